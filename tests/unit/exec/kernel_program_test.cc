// SPDX-License-Identifier: Apache-2.0
// Programs for the persistent kernel: where a lane's blocks meet, which steps run together, which programs are refused.
#include "src/exec/cuda/kernel_program.h"

#include <gtest/gtest.h>

#include <cstring>

#include "src/algo/algorithm.h"

namespace moeccl::exec {
namespace {

using cuda::WalkKind;

plan::Plan build(moecclOp_t op, const char* name, uint32_t n, bool views) {
  plan::Shape shape;
  shape.op = op;
  shape.n_ranks = n;
  shape.count = 100000;
  shape.element_bytes = 4;
  shape.reach = {true, views, views};
  const algo::Algorithm* a = algo::find(op, name);
  EXPECT_NE(a, nullptr) << name;
  return algo::build_all(*a, shape, plan::LevelTree::flat(n));
}

bool is(const cuda::WalkStep& s, WalkKind kind) { return s.kind == static_cast<uint8_t>(kind); }

TEST(KernelProgram, SignalsAndWaitsInARowAreRuns) {
  const plan::Plan plan = build(moecclOpAllReduce, "oneshot", 4, false);
  auto program = compile_kernel_program(plan.programs[1]);
  ASSERT_TRUE(program.ok()) << program.status().message();
  ASSERT_EQ(program->lanes.size(), 1u);
  ASSERT_EQ(program->steps.size(), 8u);  // copy, 3 signals, 3 waits, reduce
  EXPECT_EQ(program->steps[1].run, 3);
  EXPECT_EQ(program->steps[2].run, 2);
  EXPECT_EQ(program->steps[4].run, 3);
  EXPECT_TRUE(is(program->steps[7], WalkKind::kReduce));
  EXPECT_EQ(program->steps[7].n_srcs, 4u);
  for (const cuda::WalkStep& s : program->steps) EXPECT_EQ(s.flags & cuda::kWalkBarrier, 0);
}

TEST(KernelProgram, BlocksMeetWhereAStepUsesWhatAnEarlierOneWrote) {
  const plan::Plan plan = build(moecclOpAllReduce, "direct", 3, true);
  auto program = compile_kernel_program(plan.programs[0]);
  ASSERT_TRUE(program.ok()) << program.status().message();
  size_t sums = 0;
  for (size_t i = 0; i + 1 < program->steps.size(); ++i) {
    if (!is(program->steps[i], WalkKind::kReduce)) continue;
    // The copied data was summed by other threads, and in place a peer's output is the input that was read.
    EXPECT_TRUE(is(program->steps[i + 1], WalkKind::kCopy));
    EXPECT_NE(program->steps[i + 1].flags & cuda::kWalkBarrier, 0);
    ++sums;
  }
  EXPECT_EQ(sums, 1u);
}

TEST(KernelProgram, EveryStandardCollectiveIsOne) {
  for (const algo::Algorithm& a : algo::algorithms()) {
    for (const bool views : {false, true}) {
      plan::Shape shape;
      shape.op = a.op;
      shape.n_ranks = 8;
      shape.count = 4096;
      shape.element_bytes = 4;
      shape.reach = {true, views, views};
      const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {}, {4, 4}}});
      if (!a.applies(shape, tree).ok()) continue;
      const plan::Plan plan = algo::build_all(a, shape, tree);
      for (const plan::Program& p : plan.programs) {
        auto program = compile_kernel_program(p);
        ASSERT_TRUE(program.ok()) << a.name << ": " << program.status().message();
        EXPECT_LE(program->lanes.size(), 4u) << a.name;
        std::vector<std::byte> image(program->bytes());
        const auto at = program->write(image.data());
        if (!program->steps.empty()) {
          EXPECT_EQ(std::memcmp(image.data() + at.steps, program->steps.data(),
                                program->steps.size() * sizeof(cuda::WalkStep)),
                    0);
        }
        EXPECT_EQ(at.lanes % 16 + at.steps % 16 + at.refs % 16 + at.totals % 16, 0u);
      }
    }
  }
}

TEST(KernelProgram, RowStepsNameTheirLists) {
  plan::Program p;
  p.lanes.push_back({});
  for (const auto kind : {plan::StepKind::kGatherRows, plan::StepKind::kScatterRows, plan::StepKind::kReduceRows}) {
    plan::Step& s = p.lanes[0].steps.emplace_back();
    s.kind = kind;
    s.rows = static_cast<uint32_t>(p.lanes[0].steps.size() + 4);
  }
  auto program = compile_kernel_program(p);
  ASSERT_TRUE(program.ok()) << program.status().message();
  ASSERT_EQ(program->steps.size(), 3u);
  for (size_t i = 0; i < 3; ++i) {
    const auto kind = i < 2 ? cuda::WalkKind::kRows : cuda::WalkKind::kRowSums;
    EXPECT_EQ(program->steps[i].kind, static_cast<uint8_t>(kind)) << i;
    EXPECT_EQ(program->steps[i].ordinal, i + 5) << i;
  }
}

TEST(KernelProgram, SumsOfTooManyBuffersAreRefused) {
  for (const auto kind : {plan::StepKind::kReduce, plan::StepKind::kReduceRows}) {
    plan::Program p;
    p.lanes.push_back({});
    plan::Step& s = p.lanes[0].steps.emplace_back();
    s.kind = kind;
    s.n_srcs = cuda::kMaxSources + 1;
    p.srcs.resize(s.n_srcs);
    auto program = compile_kernel_program(p);
    ASSERT_FALSE(program.ok());
    EXPECT_EQ(program.status().code(), moecclUnsupported);
    EXPECT_NE(program.status().message().find(std::to_string(s.n_srcs) + " buffers"), std::string::npos)
        << program.status().message();
  }
}

}  // namespace
}  // namespace moeccl::exec
