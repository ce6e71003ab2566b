// SPDX-License-Identifier: Apache-2.0
// Plans for long lines: how full the price says the line is, and that the sizes of ordinary clusters do not change.
#include "src/plan/long_line.h"

#include <gtest/gtest.h>

#include "src/algo/tuning.h"
#include "src/plan/cost.h"
#include "tests/unit/algo/shapes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kMiB = 1 << 20;

plan::LevelTree two_nodes(uint32_t ranks, plan::LinkCost link) {
  return *plan::LevelTree::from_sizes({{"node", link, {ranks, ranks}}});
}

plan::Shape shape_between(const plan::LevelTree& tree, moecclOp_t op, uint64_t bytes) {
  plan::Shape shape = shape_of(op, tree.n_ranks, bytes / 64);
  shape.reach = {false, false, false};
  shape.long_line = plan::long_line(tree, {});
  shape.staging_bytes = plan::staging_for(shape.long_line, tree.n_ranks / 2, 16 * kMiB) / 2;
  return shape;
}

// Returns the time of the cheapest plan.
double best_ns(const plan::LevelTree& tree, const plan::Shape& shape) {
  double best = 0;
  for (const Algorithm& a : algorithms()) {
    if (a.op != shape.op || !a.applies(shape, tree).ok()) continue;
    const double ns = plan::price(build_all(a, shape, tree), tree, {}).total_ns;
    if (best == 0 || ns < best) best = ns;
  }
  return best;
}

// 10 Gbit/s, 20 ms one way.
TEST(LongLine, IsFilledByThePlansOfTwoRanks) {
  const plan::LinkCost link{20e6, 1.25};
  const plan::LevelTree tree = two_nodes(1, link);
  const double line_ns = static_cast<double>(64 * kMiB) / link.bytes_per_ns;
  for (const moecclOp_t op : {moecclOpAllReduce, moecclOpReduce, moecclOpBroadcast, moecclOpAllGather,
                              moecclOpReduceScatter, moecclOpAllToAll, moecclOpGather, moecclOpScatter}) {
    EXPECT_GT(line_ns / best_ns(tree, shape_between(tree, op, 64 * kMiB)), 0.6) << operation_name(op);
    EXPECT_GT(4 * line_ns / best_ns(tree, shape_between(tree, op, 256 * kMiB)), 0.8) << operation_name(op);
  }
}

// A node sends each byte of its sum once, and each block of its ranks. Every rank has room for the results of its whole
// node, so less of the staging is for the line than with one rank on each node.
TEST(LongLine, IsFilledByThePlansOfNodes) {
  const plan::LinkCost link{20e6, 1.25};
  const plan::LevelTree tree = two_nodes(2, link);
  const double line_ns = static_cast<double>(256 * kMiB) / link.bytes_per_ns;
  EXPECT_GT(line_ns / best_ns(tree, shape_between(tree, moecclOpAllReduce, 256 * kMiB)), 0.45);
  EXPECT_GT(2 * line_ns / best_ns(tree, shape_between(tree, moecclOpAllGather, 256 * kMiB)), 0.6);
  EXPECT_GT(2 * line_ns / best_ns(tree, shape_between(tree, moecclOpReduceScatter, 256 * kMiB)), 0.5);
}

TEST(LongLine, LeavesShortLinesAndShortMessagesAsTheyAre) {
  for (const auto& [link, bytes] : {std::pair{plan::LinkCost{5e3, 50}, 64 * kMiB}, {{20e6, 1.25}, 64 << 10}}) {
    const plan::LevelTree tree = two_nodes(2, link);
    for (const Algorithm& a : algorithms()) {
      plan::Shape shape = shape_between(tree, a.op, bytes);
      if (plan::facts(a.op).private_sizes || !a.applies(shape, tree).ok()) continue;
      const plan::Plan plan = build_all(a, shape, tree);
      shape.long_line = {};
      const plan::Plan usual = build_all(a, shape, tree);
      EXPECT_EQ(plan.chunking.chunk, usual.chunking.chunk) << describe(a, shape);
      EXPECT_EQ(plan.programs[0].depth, usual.programs[0].depth) << describe(a, shape);
      EXPECT_LE(plan.programs[0].depth, tuning::kOneWay) << describe(a, shape);
    }
  }
}

}  // namespace
}  // namespace moeccl::algo::testing
