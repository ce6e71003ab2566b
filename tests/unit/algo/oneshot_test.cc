// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;  // shape_of()

TEST(Oneshot, AllReduceReadsAllPeersAfterOneMeeting) {
  const plan::Shape shape = shape_of(moecclOpAllReduce, 4, 10);
  const plan::Plan plan = plan_of(moecclOpAllReduce, "oneshot", shape, plan::LevelTree::flat(4));
  const uint64_t s = 10 * kElement;
  EXPECT_EQ(traffic(plan, 2), (Traffic{0, 3 * s, 2 * s, 3, 3}));
  EXPECT_EQ(plan.programs[2].lanes.size(), 1u);
}

TEST(Oneshot, OnlyTheRootOfABroadcastSignals) {
  plan::Shape shape = shape_of(moecclOpBroadcast, 4, 10);
  shape.root = 1;
  const plan::Plan plan = plan_of(moecclOpBroadcast, "oneshot", shape, plan::LevelTree::flat(4));
  const uint64_t s = 10 * kElement;
  EXPECT_EQ(traffic(plan, 1), (Traffic{0, 0, 2 * s, 3, 0}));
  EXPECT_EQ(traffic(plan, 3), (Traffic{0, s, 0, 0, 1}));
}

TEST(Oneshot, AppliesUpToTheStaging) {
  const Algorithm* a = find(moecclOpAllToAll, "oneshot");
  ASSERT_NE(a, nullptr);
  plan::Shape shape = shape_of(moecclOpAllToAll, 4, 16);
  shape.staging_bytes = 4 * 16 * kElement;
  EXPECT_TRUE(a->applies(shape, plan::LevelTree::flat(4)).ok());
  EXPECT_EQ(a->chunking(shape, plan::LevelTree::flat(4)).n_chunks, 1u);
  shape.count = 17;
  EXPECT_EQ(a->applies(shape, plan::LevelTree::flat(4)).code(), moecclUnsupported);
}

TEST(Oneshot, NeedsStagingThatPeersCanRead) {
  plan::Shape shape = shape_of(moecclOpAllReduce, 4, 1);
  shape.reach.staging = false;
  EXPECT_FALSE(find(moecclOpAllReduce, "oneshot")->applies(shape, plan::LevelTree::flat(4)).ok());
  shape.n_ranks = 1;
  EXPECT_TRUE(find(moecclOpAllReduce, "oneshot")->applies(shape, plan::LevelTree::flat(1)).ok());
}

}  // namespace
}  // namespace moeccl::algo::testing
