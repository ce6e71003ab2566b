// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

plan::Shape with_views(moecclOp_t op, uint32_t n_ranks, uint64_t count) {
  plan::Shape shape = shape_of(op, n_ranks, count);
  shape.reach = {true, true, true};
  return shape;
}

TEST(Direct, AllReduceReadsAndWritesEachPartOnce) {
  const plan::Plan plan =
      plan_of(moecclOpAllReduce, "direct", with_views(moecclOpAllReduce, 4, 40), plan::LevelTree::flat(4));
  const uint64_t s = 40 * kElement;
  EXPECT_EQ(traffic(plan, 1), (Traffic{s * 3 / 4, s * 3 / 4, s / 4, 6, 6}));
  const plan::Lane& lane = plan.programs[1].lanes.at(0);
  const auto reduction = std::find_if(lane.steps.begin(), lane.steps.end(),
                                      [](const plan::Step& step) { return step.kind == plan::StepKind::kReduce; });
  ASSERT_NE(reduction, lane.steps.end());
  EXPECT_EQ(reduction->copies, 3);
}

TEST(Direct, ReduceScatterIsOneReduction) {
  const plan::Plan plan =
      plan_of(moecclOpReduceScatter, "direct", with_views(moecclOpReduceScatter, 4, 40), plan::LevelTree::flat(4));
  const uint64_t s = 40 * kElement;
  EXPECT_EQ(traffic(plan, 1), (Traffic{0, 3 * s, s, 6, 6}));
  EXPECT_EQ(plan.programs[1].n_slots, 0u);
}

TEST(Direct, AllGatherPushesWhereItCanAndPullsElse) {
  plan::Shape shape = with_views(moecclOpAllGather, 4, 40);
  const uint64_t s = 40 * kElement;
  EXPECT_EQ(traffic(plan_of(shape.op, "direct", shape, plan::LevelTree::flat(4)), 1), (Traffic{3 * s, 0, s, 6, 6}));
  shape.reach = {true, false, true};
  EXPECT_EQ(traffic(plan_of(shape.op, "direct", shape, plan::LevelTree::flat(4)), 1), (Traffic{0, 3 * s, s, 6, 6}));
}

// in_place is private to a rank, so a rank that works in place must exchange the signals that the others expect.
TEST(Direct, AllToAllSignalsAlikeInPlaceAndOutOfPlace) {
  plan::Shape shape = with_views(moecclOpAllToAll, 4, 40);
  const Algorithm* a = find(moecclOpAllToAll, "direct");
  const plan::Program apart = a->build(shape, plan::LevelTree::flat(4), 1);
  shape.in_place = true;
  const plan::Program in_place = a->build(shape, plan::LevelTree::flat(4), 1);
  ASSERT_EQ(apart.totals.size(), in_place.totals.size());
  for (size_t i = 0; i < apart.totals.size(); ++i) {
    EXPECT_EQ(apart.totals[i].peer, in_place.totals[i].peer);
    EXPECT_EQ(apart.totals[i].sig, in_place.totals[i].sig);
    EXPECT_EQ(apart.totals[i].sent, in_place.totals[i].sent);
    EXPECT_EQ(apart.totals[i].awaited, in_place.totals[i].awaited);
    EXPECT_EQ(apart.totals[i].once, in_place.totals[i].once);
  }
  EXPECT_EQ(apart.n_slots, in_place.n_slots);
}

TEST(Direct, ReductionsNeedViewsAndPlainInputs) {
  const plan::LevelTree tree = plan::LevelTree::flat(4);
  for (const moecclOp_t op : {moecclOpAllReduce, moecclOpReduce, moecclOpReduceScatter}) {
    const Algorithm* a = find(op, "direct");
    plan::Shape shape = with_views(op, 4, 40);
    EXPECT_TRUE(a->applies(shape, tree).ok());
    shape.scaled = true;
    EXPECT_FALSE(a->applies(shape, tree).ok());
    shape.scaled = false;
    shape.reach.views = false;
    EXPECT_FALSE(a->applies(shape, tree).ok());
  }
  plan::Shape moves = with_views(moecclOpAllToAll, 4, 40);
  moves.reach.views = false;
  EXPECT_TRUE(find(moecclOpAllToAll, "direct")->applies(moves, tree).ok());
  moves.reach.reads = false;
  EXPECT_FALSE(find(moecclOpAllToAll, "direct")->applies(moves, tree).ok());
}

}  // namespace
}  // namespace moeccl::algo::testing
