// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "src/plan/binding.h"
#include "tests/unit/algo/shapes.h"

namespace moeccl::algo {
namespace {

using testing::shape_of;

TEST(Registry, NamesAreUniqueWithinAnOperation) {
  std::set<std::pair<int, std::string>> seen;
  for (const Algorithm& a : algorithms()) {
    EXPECT_TRUE(seen.insert({a.op, a.name}).second) << a.op << " " << a.name;
    EXPECT_NE(a.summary, nullptr);
    EXPECT_EQ(find(a.op, a.name), &a);
  }
  EXPECT_EQ(find(moecclOpAllReduce, "no such"), nullptr);
}

TEST(Registry, EveryOperationHasAPlanForPrivateBuffersAndForPutsOnly) {
  for (int op = moecclOpAllReduce; op <= moecclOpScatter; ++op) {
    for (const uint32_t n : {1u, 2u, 5u, 8u, 33u}) {
      for (const auto& [name, reach] : testing::kReaches) {
        plan::Shape shape = shape_of(static_cast<moecclOp_t>(op), n, 1000);
        shape.reach = reach;
        shape.deterministic = shape.scaled = true;  // the most demanding
        bool any = false;
        for (const Algorithm& a : algorithms()) any |= a.op == op && a.applies(shape, plan::LevelTree::flat(n)).ok();
        EXPECT_TRUE(any) << "op " << op << ", " << n << " ranks, reach " << name;
      }
    }
  }
}

TEST(Registry, RefusalsSayWhy) {
  plan::Shape shape = shape_of(moecclOpAllReduce, 4, 10);
  shape.deterministic = true;
  shape.reach = {false, false, false};
  for (const Algorithm& a : algorithms()) {
    if (a.op != shape.op) continue;
    const Status status = a.applies(shape, plan::LevelTree::flat(4));
    if (status.ok()) continue;
    EXPECT_EQ(status.code(), moecclUnsupported) << a.name;
    EXPECT_GT(status.message().size(), 20u) << a.name;
  }
}

TEST(Registry, HashIgnoresInPlaceAndSeesTheRest) {
  const Algorithm* ring = find(moecclOpAllReduce, "ring");
  ASSERT_NE(ring, nullptr);
  const plan::LevelTree tree = plan::LevelTree::flat(4);
  const plan::Shape shape = shape_of(moecclOpAllReduce, 4, 10);
  const uint64_t hash = build_for(*ring, shape, tree, 1).hash;
  EXPECT_EQ(hash, build_all(*ring, shape, tree).hash);
  plan::Shape other = shape;
  other.in_place = true;
  EXPECT_EQ(hash, build_for(*ring, other, tree, 2).hash);
  other = shape;
  other.count = 11;
  EXPECT_NE(hash, build_for(*ring, other, tree, 1).hash);
  EXPECT_NE(hash, build_for(*ring, shape, testing::nodes({2, 2}), 1).hash);
  EXPECT_NE(hash, build_for(*find(moecclOpAllReduce, "tree"), shape, tree, 1).hash);
}

// Checks the requirements of plan.h on every chunking, with sizes from nothing to more than the staging.
TEST(Registry, ChunkingsCoverBlocksAndFitTheStaging) {
  for (const Algorithm& a : algorithms()) {
    for (const uint32_t n : {1u, 2u, 7u, 8u}) {
      for (const uint32_t element_bytes : {1u, 2u, 4u, 8u, 64u}) {
        for (const uint64_t count : {0ull, 1ull, 1000ull, 65537ull, 10000019ull}) {
          for (const uint64_t staging : {uint64_t{64} << 10, uint64_t{16} << 20}) {
            plan::Shape shape = shape_of(a.op, n, count);
            shape.element_bytes = element_bytes;
            shape.staging_bytes = staging;
            shape.reach = {true, true, true};
            const plan::LevelTree tree = n == 8 ? testing::nodes({3, 5}) : plan::LevelTree::flat(n);
            if (!a.applies(shape, tree).ok()) continue;
            const plan::Chunking k = a.chunking(shape, tree);
            const plan::Program program = a.build(shape, tree, n - 1);
            const std::string what = testing::describe(a, shape) + ", element " + std::to_string(element_bytes);
            EXPECT_GE(k.n_chunks, 1u) << what;
            EXPECT_GE(k.chunk * k.n_chunks, count) << what;
            if (count > 0) {
              EXPECT_LT(k.chunk * (k.n_chunks - 1), count) << what;
            }
            if (k.n_chunks > 1) {
              EXPECT_EQ(k.chunk * element_bytes % 64, 0u) << what;
            }
            plan::Binding binding;
            binding.element_bytes = element_bytes;
            binding.slot_elements = plan::whole_lines(k.chunk, element_bytes);
            if (program.n_slots > 0) {
              EXPECT_LE(plan::staging_elements(binding, program) * element_bytes, staging) << what;
            }
          }
        }
      }
    }
  }
}

TEST(Registry, BuiltProgramsAgreeOnSlotsAndDepth) {
  for (const Algorithm& a : algorithms()) {
    for (const auto& [name, tree] : testing::trees(6)) {
      plan::Shape shape = shape_of(a.op, 6, 100);
      shape.reach = {true, true, true};
      if (!a.applies(shape, tree).ok()) continue;
      const plan::Plan plan = build_all(a, shape, tree);
      for (const plan::Program& program : plan.programs) {
        EXPECT_EQ(program.n_slots, plan.programs[0].n_slots) << a.name;
        EXPECT_EQ(program.depth, plan.programs[0].depth) << a.name;
        EXPECT_EQ(program.n_part_slots, plan.programs[0].n_part_slots) << a.name;
        EXPECT_EQ(program.slot_parts, plan.programs[0].slot_parts) << a.name;
      }
    }
  }
}

}  // namespace
}  // namespace moeccl::algo
