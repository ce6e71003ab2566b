// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

TEST(Tree, RootServesLog2Children) {
  for (const uint32_t n : {2u, 3u, 5u, 8u, 9u, 33u}) {
    plan::Shape shape = shape_of(moecclOpBroadcast, n, 10);
    shape.root = n - 1;
    const plan::Plan plan = plan_of(moecclOpBroadcast, "tree", shape, plan::LevelTree::flat(n));
    uint32_t log = 0;
    while ((1u << log) < n) ++log;
    EXPECT_EQ(traffic(plan, n - 1).put, log * 10 * kElement) << n;
    uint64_t all = 0;
    for (uint32_t rank = 0; rank < n; ++rank) all += traffic(plan, rank).put;
    EXPECT_EQ(all, (n - 1) * 10 * kElement) << n;
  }
}

TEST(Tree, ReducePutsEachMessageOnce) {
  const plan::Plan plan = plan_of(moecclOpReduce, "tree", shape_of(moecclOpReduce, 7, 10), plan::LevelTree::flat(7));
  EXPECT_EQ(traffic(plan, 0).put, 0u);
  for (uint32_t rank = 1; rank < 7; ++rank) EXPECT_EQ(traffic(plan, rank).put, 10 * kElement) << rank;
}

TEST(Tree, AllReduceGoesUpAndDownOnLanesOfTheirOwn) {
  const plan::Plan plan =
      plan_of(moecclOpAllReduce, "tree", shape_of(moecclOpAllReduce, 8, 10), plan::LevelTree::flat(8));
  EXPECT_EQ(plan.programs[5].lanes.size(), 2u);
  EXPECT_EQ(traffic(plan, 7).put, 10 * kElement);      // a leaf
  EXPECT_EQ(traffic(plan, 0).put, 3 * 10 * kElement);  // the root
}

}  // namespace
}  // namespace moeccl::algo::testing
