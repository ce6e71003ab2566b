// SPDX-License-Identifier: Apache-2.0
#include "src/plan/levels.h"

#include <gtest/gtest.h>

#include <limits>

namespace moeccl::plan {
namespace {

LevelTree tree_of(const std::vector<LevelSizes>& upper) {
  Result<LevelTree> tree = LevelTree::from_sizes(upper);
  EXPECT_TRUE(tree.ok()) << tree.status().message();
  return tree.ok() ? *tree : LevelTree::flat(1);
}

using Ranks = std::vector<uint32_t>;

Ranks members(const LevelTree& tree, uint32_t level, uint32_t group) {
  const Groups groups(tree.levels[level]);
  return {groups.members(group).begin(), groups.members(group).end()};
}

TEST(Levels, FlatTreeIsOneLevelOfRanks) {
  const LevelTree tree = LevelTree::flat(5);
  EXPECT_TRUE(tree.validate().ok());
  EXPECT_EQ(tree.depth(), 1u);
  EXPECT_EQ(tree.level_between(1, 4), 0u);
  EXPECT_EQ(tree.level_between(3, 3), 1u);
}

TEST(Levels, UnequalNodesHoldTheirRanksInOrder) {
  const LevelTree tree = tree_of({{"node", {}, {7, 8}}});
  EXPECT_EQ(tree.n_ranks, 15u);
  EXPECT_EQ(tree.depth(), 2u);
  EXPECT_EQ(members(tree, 0, 0), (Ranks{0, 1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(members(tree, 0, 1).front(), 7u);
  EXPECT_EQ(tree.level_between(6, 7), 0u);
  EXPECT_EQ(tree.level_between(7, 8), 1u);
}

TEST(Levels, DeeperSizesCountGroupsOfTheNextLevel) {
  const LevelTree tree = tree_of({{"dc", {}, {2, 3}}, {"node", {}, {4, 1, 2, 2, 3}}});
  EXPECT_EQ(tree.n_ranks, 12u);
  EXPECT_EQ(members(tree, 0, 0), (Ranks{0, 1, 2, 3, 4}));
  EXPECT_EQ(members(tree, 1, 4), (Ranks{9, 10, 11}));
  EXPECT_EQ(tree.level_between(4, 5), 0u);
  EXPECT_EQ(tree.level_between(3, 4), 1u);
  EXPECT_EQ(tree.level_between(0, 3), 2u);
}

TEST(Levels, SizesThatDoNotFitAreRefused) {
  EXPECT_FALSE(LevelTree::from_sizes({}).ok());
  EXPECT_FALSE(LevelTree::from_sizes({{"node", {}, {}}}).ok());
  EXPECT_FALSE(LevelTree::from_sizes({{"node", {}, {3, 0}}}).ok());
  EXPECT_FALSE(LevelTree::from_sizes({{"dc", {}, {2}}, {"node", {}, {1, 1, 1}}}).ok());
  EXPECT_FALSE(LevelTree::from_sizes({{"node", {}, {1u << 20, 1}}}).ok());
}

TEST(Levels, ValidateNamesTheBrokenLevel) {
  LevelTree tree = tree_of({{"node", {}, {2, 2}}});
  tree.levels[0].group_of_rank = {1, 0, 1, 0};
  EXPECT_NE(tree.validate().message().find("node"), std::string::npos);
  tree.levels[0].group_of_rank = {0, 1, 0, 1};  // ranks are dealt in turn
  EXPECT_TRUE(tree.validate().ok());
  tree.levels[0].n_groups = 3;
  EXPECT_FALSE(tree.validate().ok());
  tree.levels[0].n_groups = 2;
  tree.levels[0].link.alpha_ns = std::numeric_limits<double>::quiet_NaN();
  EXPECT_FALSE(tree.validate().ok());
}

TEST(Levels, AGroupMayNotLieInTwoGroups) {
  LevelTree tree = tree_of({{"dc", {}, {1, 1}}, {"node", {}, {2, 2}}});
  tree.levels[0].group_of_rank = {0, 1, 1, 1};
  EXPECT_NE(tree.validate().message().find("node 0 lies in dc 0 and in dc 1"), std::string::npos)
      << tree.validate().message();
}

TEST(Levels, TruncatedKeepsOuterLevelsAndRanks) {
  const LevelTree tree = tree_of({{"dc", {}, {2, 2}}, {"node", {}, {2, 2, 2, 2}}});
  EXPECT_EQ(tree.truncated(3).hash(), tree.hash());
  EXPECT_EQ(tree.truncated(9).hash(), tree.hash());
  EXPECT_EQ(tree.truncated(2).levels[0].name, "dc");
  EXPECT_EQ(tree.truncated(2).levels[1].name, "rank");
  EXPECT_EQ(tree.truncated(1).depth(), 1u);
  EXPECT_TRUE(tree.truncated(2).validate().ok());
}

TEST(Levels, CounterpartHasTheSamePositionModuloTheSize) {
  const LevelTree tree = tree_of({{"node", {}, {4, 3}}});
  const Groups nodes(tree.levels[0]);
  EXPECT_EQ(nodes.counterpart(2, 1), 6u);
  EXPECT_EQ(nodes.counterpart(3, 1), 4u);
  EXPECT_EQ(nodes.counterpart(6, 0), 2u);
  EXPECT_EQ(nodes.counterpart(2, 0), 2u);
}

TEST(Levels, HashTellsTreesApart) {
  const LevelTree a = tree_of({{"node", {}, {7, 8}}}), b = tree_of({{"node", {}, {8, 7}}});
  LevelTree c = a;
  c.levels[0].link.bytes_per_ns = 1;
  EXPECT_EQ(a.hash(), tree_of({{"node", {}, {7, 8}}}).hash());
  EXPECT_NE(a.hash(), b.hash());
  EXPECT_NE(a.hash(), c.hash());
  EXPECT_NE(a.hash(), LevelTree::flat(15).hash());
}

}  // namespace
}  // namespace moeccl::plan
