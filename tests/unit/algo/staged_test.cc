// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

TEST(Staged, AllReduceReadsEachPartTwice) {
  const plan::Shape shape = shape_of(moecclOpAllReduce, 4, 40);
  const plan::Plan plan = plan_of(moecclOpAllReduce, "staged", shape, plan::LevelTree::flat(4));
  const uint64_t s = 40 * kElement;
  EXPECT_EQ(traffic(plan, 1), (Traffic{0, 2 * s * 3 / 4, s * 3 / 4 + s / 4 + s / 4, 6, 6}));
}

TEST(Staged, AllReduceCopiesInAheadOfItsReductions) {
  const plan::Plan plan =
      plan_of(moecclOpAllReduce, "staged", shape_of(moecclOpAllReduce, 4, 40), plan::LevelTree::flat(4));
  ASSERT_EQ(plan.programs[0].lanes.size(), 3u);
  EXPECT_EQ(plan.programs[0].lanes[0].kind, plan::LaneKind::kMain);  // the lane that peers wait for comes first
  const plan::Step& credit = plan.programs[0].lanes[1].steps.front();
  EXPECT_EQ(credit.kind, plan::StepKind::kWait);
  EXPECT_EQ(credit.peer, 0u);
  EXPECT_EQ(credit.lag, plan.programs[0].depth);
}

TEST(Staged, ExchangesMeetOncePerChunk) {
  for (const moecclOp_t op : {moecclOpAllGather, moecclOpReduceScatter, moecclOpAllToAll, moecclOpAllToAllv}) {
    const plan::Plan plan = plan_of(op, "staged", shape_of(op, 5, 40), plan::LevelTree::flat(5));
    const Traffic t = traffic(plan, 3);
    EXPECT_EQ(t.signals, 4u) << op;
    EXPECT_EQ(t.waits, 4u) << op;
    EXPECT_EQ(t.pulled, 4 * 40 * kElement) << op;
    EXPECT_EQ(t.put, 0u) << op;
  }
}

TEST(Staged, CachedKeepsInTheCacheWhatStagedStoresPastIt) {
  for (const moecclOp_t op :
       {moecclOpAllReduce, moecclOpAllGather, moecclOpReduceScatter, moecclOpAllToAll, moecclOpAllToAllv}) {
    const plan::LevelTree tree = plan::LevelTree::flat(4);
    const auto kept = [&](const char* name) {
      const plan::Plan plan = plan_of(op, name, shape_of(op, 4, 40), tree);
      uint32_t stored = 0, cached = 0;
      for (const plan::Lane& lane : plan.programs[1].lanes) {
        for (const plan::Step& s : lane.steps) {
          if (s.kind != plan::StepKind::kCopy || s.dst.buffer != plan::Buffer::kStaging) continue;
          ++stored;
          cached += s.read_again;
        }
      }
      EXPECT_GT(stored, 0u) << op;
      return std::pair(stored, cached);
    };
    EXPECT_EQ(kept("staged").second, 0u) << op;
    EXPECT_EQ(kept("cached").second, kept("staged").first) << op;
    EXPECT_EQ(traffic(plan_of(op, "cached", shape_of(op, 4, 40), tree), 1),
              traffic(plan_of(op, "staged", shape_of(op, 4, 40), tree), 1))
        << op;
  }
}

TEST(Staged, ReduceSpreadsTheWorkOverAllRanks) {
  const plan::Plan plan = plan_of(moecclOpReduce, "staged", shape_of(moecclOpReduce, 4, 40), plan::LevelTree::flat(4));
  const uint64_t s = 40 * kElement;
  EXPECT_EQ(traffic(plan, 1).pulled, s * 3 / 4);
  EXPECT_EQ(traffic(plan, 0).pulled, 2 * s * 3 / 4);
}

}  // namespace
}  // namespace moeccl::algo::testing
