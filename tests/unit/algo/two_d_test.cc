// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>

#include "src/algo/nodes.h"
#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

// The bytes and signals that a rank sends to ranks of other nodes.
struct Across {
  uint64_t bytes = 0;
  uint32_t messages = 0;
};
Across across(const plan::Plan& plan, const plan::LevelTree& tree, uint32_t rank) {
  Across sum;
  const auto elsewhere = [&](uint32_t peer) {
    return tree.levels[0].group_of_rank[peer] != tree.levels[0].group_of_rank[rank];
  };
  for (const plan::Step& step : plan.programs[rank].lanes[0].steps) {
    if (step.kind == plan::StepKind::kPut && elsewhere(step.dst.rank)) sum.bytes += plan.shape.count * kElement;
    if (step.kind == plan::StepKind::kSignal && elsewhere(step.peer)) ++sum.messages;
  }
  return sum;
}

TEST(TwoDimensional, OneMessagePerNodeCarriesANodesBlocks) {
  const plan::LevelTree tree = nodes({4, 4, 4});
  const plan::Plan plan = plan_of(moecclOpAllToAll, "2dh", shape_of(moecclOpAllToAll, 12, 10), tree);
  for (uint32_t rank = 0; rank < 12; ++rank) {
    EXPECT_EQ(across(plan, tree, rank).messages, 2u);
    EXPECT_EQ(across(plan, tree, rank).bytes, 8 * 10 * kElement);
  }
}

TEST(TwoDimensional, ASmallNodeRelaysForSeveral) {
  const plan::LevelTree tree = nodes({2, 5});
  const plan::Plan plan = plan_of(moecclOpAllToAll, "2dh", shape_of(moecclOpAllToAll, 7, 10), tree);
  EXPECT_EQ(across(plan, tree, 0).messages, 3u);  // for ranks 2, 4 and 6
  EXPECT_EQ(across(plan, tree, 1).messages, 2u);
  EXPECT_EQ(across(plan, tree, 2).messages, 1u);
  EXPECT_EQ(across(plan, tree, 6).messages, 0u);
}

TEST(TwoDimensional, RelaysAreTheTreesCounterparts) {
  for (const auto& [name, tree] : trees(12)) {
    if (tree.depth() < 2) continue;
    const Nodes table(tree);
    const std::vector<uint32_t>& node_of = tree.levels[0].group_of_rank;
    const auto by_definition = [&](uint32_t rank, uint32_t node) {
      const auto position = std::count(node_of.begin(), node_of.begin() + rank, node_of[rank]);
      auto skip = position % std::count(node_of.begin(), node_of.end(), node);
      for (uint32_t r = 0;; ++r)
        if (node_of[r] == node && skip-- == 0) return r;
    };
    for (uint32_t rank = 0; rank < 12; ++rank)
      for (uint32_t node = 0; node < table.n_nodes(); ++node)
        EXPECT_EQ(table.relay(node, rank), by_definition(rank, node)) << name;
  }
}

TEST(TwoDimensional, NeedsTwoLevels) {
  const Algorithm* a = find(moecclOpAllToAll, "2dh");
  EXPECT_FALSE(a->applies(shape_of(moecclOpAllToAll, 4, 10), plan::LevelTree::flat(4)).ok());
  EXPECT_FALSE(a->applies(shape_of(moecclOpAllToAll, 4, 10), nodes({4})).ok());
  EXPECT_FALSE(a->applies(shape_of(moecclOpAllToAll, 4, 10), nodes({1, 1, 1, 1})).ok());
  EXPECT_TRUE(a->applies(shape_of(moecclOpAllToAll, 4, 10), nodes({1, 3})).ok());
}

}  // namespace
}  // namespace moeccl::algo::testing
