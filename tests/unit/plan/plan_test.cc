// SPDX-License-Identifier: Apache-2.0
#include "src/plan/plan.h"

#include <gtest/gtest.h>

#include "tests/unit/plan/hand_plans.h"

namespace moeccl::plan {
namespace {

using namespace testing;

TEST(Plan, FinalizeNumbersSignalsPerPeerAndSig) {
  Program p = Writer(0, 1).signal(1, 0).signal(2, 0).signal(1, 0).wait(1, 0, 2).signal(1, 3).done();
  const std::vector<Step>& s = p.lanes[0].steps;
  EXPECT_EQ(s[0].ordinal, 0u);
  EXPECT_EQ(s[1].ordinal, 0u);
  EXPECT_EQ(s[2].ordinal, 1u);
  EXPECT_EQ(s[3].ordinal, 0u);
  EXPECT_EQ(s[4].ordinal, 0u);
  EXPECT_EQ(s[0].per_chunk, 2u);
  EXPECT_EQ(s[1].per_chunk, 1u);
  EXPECT_EQ(s[3].per_chunk, 1u);
  p.finalize();
  EXPECT_EQ(p.totals.size(), 3u) << "a second call changes nothing";
}

TEST(Plan, TotalsAddUpPerPeerAndSig) {
  const Program p = Writer(0, 1)
                        .when(When::kFirst)
                        .signal(2, 1)
                        .wait(2, 1)
                        .when(When::kEvery)
                        .signal(1, 0)
                        .signal(1, 0)
                        .wait(1, 0)
                        .done();
  ASSERT_EQ(p.totals.size(), 2u);
  EXPECT_EQ(p.totals[0].peer, 1u);
  EXPECT_EQ(p.totals[0].sent, 2u);
  EXPECT_EQ(p.totals[0].awaited, 1u);
  EXPECT_FALSE(p.totals[0].once);
  EXPECT_EQ(p.totals[1].peer, 2u);
  EXPECT_TRUE(p.totals[1].once);
}

TEST(Plan, TotalsKeepDirectionsApartThatRunAtDifferentChunks) {
  const Program p = Writer(0, 1).signal(1, 0).when(When::kLast).wait(1, 0).done();
  ASSERT_EQ(p.totals.size(), 2u);
  EXPECT_EQ(p.totals[0].sent, 1u);
  EXPECT_FALSE(p.totals[0].once);
  EXPECT_EQ(p.totals[1].awaited, 1u);
  EXPECT_TRUE(p.totals[1].once);
}

TEST(Plan, BlocksFollowThePublicHeader) {
  EXPECT_EQ(in_blocks(moecclOpAllReduce, 5), 1u);
  EXPECT_EQ(out_blocks(moecclOpAllGather, 5), 5u);
  EXPECT_EQ(in_blocks(moecclOpAllGather, 5), 1u);
  EXPECT_EQ(in_blocks(moecclOpReduceScatter, 5), 5u);
  EXPECT_EQ(out_blocks(moecclOpReduceScatter, 5), 1u);
  EXPECT_EQ(in_blocks(moecclOpAllToAll, 5), 5u);
  EXPECT_EQ(out_blocks(moecclOpAllToAllv, 5), 5u);
  EXPECT_EQ(out_blocks(moecclOpGather, 5), 5u);
  EXPECT_EQ(in_blocks(moecclOpScatter, 5), 5u);
}

TEST(Plan, NamesAreWords) {
  for (int k = 0; k < kNumStepKinds; ++k) EXPECT_STRNE(step_kind_name(static_cast<StepKind>(k)), "unknown");
  EXPECT_STREQ(lane_kind_name(LaneKind::kInter), "inter");
  EXPECT_EQ(broadcast_with_credits().programs[0].n_steps(), 4u);
}

}  // namespace
}  // namespace moeccl::plan
