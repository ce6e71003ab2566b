// SPDX-License-Identifier: Apache-2.0
// The persistent kernel for rows, with the plans and tables of random routings on uneven trees: dispatch and combine
// give the same as the interpreter of plans with the reference kernels, in buffers of exact size.
#include <gtest/gtest.h>

#include <memory>
#include <thread>

#include "src/exec/cuda/kernel_program.h"
#include "src/exec/cuda/tables/row_image.h"
#include "tests/support/interpreter.h"
#include "tests/support/moe_cluster.h"
#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

// One rank's device memory.
struct RankMemory {
  std::vector<uint64_t> header, staging;
  std::vector<WalkPeer> peers;
  WalkReport report{};
  uint64_t completed = 0;
  std::vector<std::byte> program, tables;
  WalkTables head{};
  std::unique_ptr<std::byte[]> in, out;
  size_t in_bytes = 0, out_bytes = 0;
};

class RowWorld {
 public:
  RowWorld(const test::MoeCluster& cluster, moecclDataType_t type)
      : c_(cluster), type_(type), ranks_(cluster.n()), half_(staging_bytes()) {
    for (RankMemory& r : ranks_) {
      r.header.assign(walk_header_bytes(c_.n()) / 8, 0);
      r.staging.assign(2 * half_ / 8, 0);
    }
    for (RankMemory& r : ranks_)
      for (RankMemory& p : ranks_)
        r.peers.push_back(
            {reinterpret_cast<WalkHeader*>(p.header.data()), reinterpret_cast<uint8_t*>(p.staging.data()), nullptr});
  }
  RankMemory& rank(uint32_t r) { return ranks_[r]; }

  void upload() {
    for (uint32_t r = 0; r < c_.n(); ++r) {
      const algo::RoutingTables& t = c_.tables[r];
      const exec::RowListsOnHost lists{t.n_chunks(), t.dispatch_rows(true), t.dispatch_sums(), t.combine_sums(true)};
      ranks_[r].tables.resize(exec::RowImage::bytes(lists));
      ranks_[r].head = exec::RowImage::write(lists, ranks_[r].tables.data(), ranks_[r].tables.data());
    }
  }

  // Runs all ranks' kernels at once, and the interpreter, and compares every Output.
  void run(moecclOp_t op, bool weighted, Random& random) {
    const plan::Plan plan = c_.plan(op);
    const std::vector<plan::Binding> bindings = c_.bindings(op, weighted);
    const bool forward = op == moecclOpDispatch;
    std::vector<test::RankBuffers> buffers;
    std::vector<std::vector<std::byte>> want(c_.n());
    std::vector<WalkRowsArgs> args;
    for (uint32_t r = 0; r < c_.n(); ++r) {
      const size_t tokens = c_.test_case.tokens[r], rows = c_.tables[r].n_rows();
      fill(ranks_[r], forward ? tokens : rows, forward ? rows : tokens, random);
      want[r].assign(ranks_[r].out_bytes, std::byte{0x5a});
      buffers.push_back({ranks_[r].in.get(), want[r].data()});
      args.push_back(args_of(r, op, weighted, plan.programs[r], bindings[r]));
    }
    std::vector<std::thread> threads;
    for (uint32_t r = 0; r < c_.n(); ++r) {
      const emulation::Launch how{.blocks = static_cast<uint32_t>(1 + random.below(2)) * args[r].walk.n_lanes,
                                  .threads = 32,
                                  .concurrent = true,
                                  .seed = random.bits()};
      threads.emplace_back(
          [&, r, how] { emulation::launch(*emulation::find_kernel("moeccl_walk_rows"), &args[r], how); });
    }
    for (auto& t : threads) t.join();
    ++shapes_run();
    // Without weights a dispatch moves bytes.
    test::Interpreter reference(plan.programs, bindings, buffers, forward && !weighted ? moecclUint8 : type_,
                                c_.test_case.shape.grouped);
    ASSERT_TRUE(reference.run(static_cast<uint32_t>(random.bits())));
    for (uint32_t r = 0; r < c_.n(); ++r) {
      ASSERT_EQ(ranks_[r].report.kind, 0u);
      if (want[r].empty()) continue;
      ASSERT_EQ(std::memcmp(ranks_[r].out.get(), want[r].data(), want[r].size()), 0)
          << (forward ? "dispatch" : "combine") << (weighted ? " with weights" : "") << ", rank " << r << " of "
          << c_.n() << ", " << bindings[r].chunking.n_chunks << " chunks, type " << kTypeNames[type_];
    }
  }

  WalkRowsArgs args_of(uint32_t r, moecclOp_t op, bool weighted, const plan::Program& program,
                       const plan::Binding& binding) {
    RankMemory& m = ranks_[r];
    const auto compiled = exec::compile_kernel_program(program);
    EXPECT_TRUE(compiled.ok()) << compiled.status().message();
    const exec::KernelProgram& walk = compiled.value();
    m.program.resize(walk.bytes());
    const auto at = walk.write(m.program.data());
    WalkRowsArgs a{};
    WalkArgs& k = a.walk;
    k.lanes = reinterpret_cast<const WalkLane*>(m.program.data() + at.lanes);
    k.steps = reinterpret_cast<const WalkStep*>(m.program.data() + at.steps);
    k.refs = reinterpret_cast<const WalkRef*>(m.program.data() + at.refs);
    k.totals = reinterpret_cast<const WalkTotal*>(m.program.data() + at.totals);
    k.n_lanes = static_cast<uint32_t>(walk.lanes.size()), k.n_steps = static_cast<uint32_t>(walk.steps.size());
    k.n_refs = static_cast<uint32_t>(walk.refs.size()), k.n_totals = static_cast<uint32_t>(walk.totals.size());
    k.header = reinterpret_cast<WalkHeader*>(m.header.data());
    k.peers = m.peers.data();
    k.report = &m.report;
    k.completed = &m.completed;
    k.number = m.completed + 1;
    k.rank = r;
    k.n_ranks = c_.n();
    k.signature = static_cast<uint64_t>(op);
    k.input = m.in.get();
    k.output = m.out.get();
    k.chunk = k.slot_elements = binding.slot_elements;
    k.half_bytes = half_;
    k.timeout_ns = 60'000'000'000ull;
    k.depth = program.depth;
    k.n_slots = program.n_slots;
    k.element_bytes = binding.element_bytes;
    a.tables = &m.head;
    a.dispatch = op == moecclOpDispatch;
    a.weighted = weighted;
    a.grouped = c_.test_case.shape.grouped;
    a.type = static_cast<uint32_t>(op == moecclOpDispatch && !weighted ? moecclUint8 : type_);
    a.row_elements = binding.element_bytes / static_cast<uint32_t>(kTypeSizes[a.type]);
    return a;
  }

  void fill(RankMemory& m, size_t rows_in, size_t rows_out, Random& random) const {
    const size_t row = c_.test_case.shape.row_bytes, size = kTypeSizes[type_];
    m.in_bytes = rows_in * row, m.out_bytes = rows_out * row;
    // Exact size, so that the sanitizer notices each byte that is read or written outside.
    m.in = std::make_unique<std::byte[]>(m.in_bytes);
    m.out = std::make_unique<std::byte[]>(m.out_bytes);
    std::memset(m.out.get(), 0x5a, m.out_bytes);
    for (size_t i = 0; i + size <= m.in_bytes; i += size) {
      if (is_float(type_)) {
        kernels::write_float(type_, m.in.get() + i, random.normal());
      } else {
        for (size_t b = 0; b < size; ++b) m.in[i + b] = static_cast<std::byte>(random.bits());
      }
    }
  }

 private:
  uint64_t staging_bytes() const {
    const uint64_t bytes = algo::moe_staging_bytes(c_.test_case.shape, c_.plan_shape, c_.slot_rows_);
    return (bytes + 255) / 256 * 256;
  }

  const test::MoeCluster& c_;
  moecclDataType_t type_;
  std::vector<RankMemory> ranks_;
  uint64_t half_;
};

TEST(WalkRows, RandomRoutingsOnUnevenTreesGiveTheInterpretersBits) {
  Random random(21);
  const std::vector<test::NamedTree> trees = test::moe_trees();
  constexpr moecclDataType_t kTypes[] = {moecclBfloat16, moecclFloat32, moecclFloat16, moecclFloat64,
                                         moecclInt32,    moecclUint8,   moecclInt64,   moecclFloat8e4m3};
  for (int round = 0; round < 60; ++round) {
    const test::NamedTree& tree = trees[random.below(trees.size())];
    if (tree.tree.n_ranks > 8) continue;
    const auto seed = static_cast<uint32_t>(random.bits());
    test::Random draw(seed);
    test::MoeCase moe = test::random_case(tree.tree, draw);
    const moecclDataType_t type = kTypes[random.below(std::size(kTypes))];
    moe.shape.row_bytes = kTypeSizes[type] * (1 + random.below(random.chance(20) ? 300 : 20));
    moe.shape.capacity = random.chance(30) ? static_cast<uint32_t>(1 + random.below(4)) : 0;
    moe.shape.grouped = random.chance(30) && algo::check_groups(tree.tree).ok();
    test::MoeCluster cluster(moe, seed);
    const auto algorithms = algo::moe_candidates(tree.tree);
    cluster.route(algorithms[random.below(algorithms.size())], 0);
    const uint64_t whole = cluster.slot_rows_;
    if (random.chance(60)) {
      // Slots that hold less than everything, so that there are several chunks. One row of each origin and choice
      // always fits.
      const bool dedup = cluster.paths->algorithm().dedup();
      const uint64_t least = dedup ? 1 : uint64_t{tree.tree.n_ranks} * moe.shape.top_k;
      cluster.route(cluster.paths->algorithm(), std::max(least, whole / (1 + random.below(4))));
    }
    if (HasFatalFailure()) return;
    RowWorld world(cluster, type);
    world.upload();
    world.run(moecclOpDispatch, false, random);
    world.run(moecclOpCombine, true, random);
    world.run(moecclOpCombine, false, random);
    if (moe.shape.expert_major) world.run(moecclOpDispatch, true, random);
    if (HasFatalFailure()) return;
  }
}

TEST(WalkRows, AnEmptyRoutingEndsTheLaunch) {
  test::Random draw(3);
  test::MoeCluster cluster(test::random_case(plan::LevelTree::flat(1), draw), 3);
  cluster.route(algo::moe_candidates(cluster.test_case.tree)[0], 0);
  RowWorld world(cluster, moecclFloat32);
  Random random(1);
  world.fill(world.rank(0), 1, 1, random);
  const plan::Plan plan = cluster.plan(moecclOpCombine);
  const WalkRowsArgs args =
      world.args_of(0, moecclOpCombine, true, plan.programs[0], cluster.bindings(moecclOpCombine, true)[0]);
  emulation::launch(*emulation::find_kernel("moeccl_walk_rows"), &args,
                    {.blocks = args.walk.n_lanes, .threads = 32, .concurrent = true, .seed = 1});
  EXPECT_EQ(world.rank(0).report.kind, static_cast<uint64_t>(WalkFailure::kNoTables));
  EXPECT_EQ(world.rank(0).completed, 1u) << "the kernel has left";
}

}  // namespace
}  // namespace moeccl::cuda
