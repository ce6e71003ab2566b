// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/drift.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace perf {
namespace {

// Phases of ten steps. flat takes 10 in the odd phases and 20 in the even ones, hier:2 the other way round, and auto
// takes the time of its plan. plans[i] is "f" or "h", the plan of step i.
DriftTrace trace(const std::string& plans) {
  DriftTrace t;
  t.phases = {"a", "b", "c"};
  t.plans = {"flat", "hier:2"};
  for (size_t i = 0; i < plans.size(); i++) {
    const size_t phase = i / 10;
    const double flat = phase % 2 == 0 ? 10 : 20, hier = 30 - flat;
    const bool is_flat = plans[i] == 'f';
    t.steps.push_back({phase, is_flat ? "flat" : "hier:2", is_flat ? flat : hier, {flat, hier}});
  }
  return t;
}

TEST(Drift, AnAutoThatSwitchesAtOnceIsTheOracle) {
  const DriftSummary s = summarize(trace("ffffffffffhhhhhhhhhhffffffffff"));
  ASSERT_EQ(s.phases.size(), 3u);
  EXPECT_EQ(s.phases[0].best, "flat");
  EXPECT_EQ(s.phases[1].best, "hier:2");
  EXPECT_DOUBLE_EQ(s.phases[1].keeping, 2);
  EXPECT_EQ(s.phases[1].followed_in, 0);
  EXPECT_EQ(s.phases[2].followed_in, 0);
  EXPECT_DOUBLE_EQ(s.over_oracle, 1);
  EXPECT_TRUE(s.shows);
  EXPECT_TRUE(s.broken.empty());
}

TEST(Drift, CountsTheStepsUntilAutoHasFollowedAndWhatTheyCost) {
  const DriftSummary s = summarize(trace("ffffffffffffffhhhhhhffffffffff"));
  EXPECT_EQ(s.phases[1].followed_in, 4);
  EXPECT_DOUBLE_EQ(s.phases[1].auto_us, 4 * 20 + 6 * 10);
  EXPECT_DOUBLE_EQ(s.over_oracle, 340.0 / 300);
  ASSERT_EQ(s.broken.size(), 1u);
  EXPECT_NE(s.broken[0].find("1.133"), std::string::npos);
}

TEST(Drift, AShortTrialOfAnotherPlanIsNoReturn) {
  EXPECT_EQ(summarize(trace("ffffffffffhhhhhfhhhhffffffffff")).phases[1].followed_in, 0);
  EXPECT_EQ(summarize(trace("ffffffffffhhhfffhhhhffffffffff")).phases[1].followed_in, 6);
}

TEST(Drift, NeverFollowingIsBroken) {
  const DriftSummary s = summarize(trace("ffffffffffffffffffffffffffffff"));
  EXPECT_EQ(s.phases[1].followed_in, -1);
  EXPECT_EQ(s.broken.size(), 2u);
  EXPECT_NE(s.broken[0].find("never followed"), std::string::npos);
}

TEST(Drift, APlanNearlyAsFastAsTheBestIsAsRight) {
  DriftTrace t = trace("ffffffffffffffffffffffffffffff");
  for (DriftStep& step : t.steps) step.forced_us = {10.5, 10};
  const DriftSummary s = summarize(t);
  EXPECT_EQ(s.phases[1].followed_in, 0);
  EXPECT_FALSE(s.shows);  // the best plan never changes
}

TEST(Drift, PlansThatNobodyForcedAreNotGood) {
  DriftTrace t = trace("ffffffffffhhhhhhhhhhffffffffff");
  for (size_t i = 10; i < 20; i++) t.steps[i].plan = "2dh";
  EXPECT_EQ(summarize(t).phases[1].followed_in, -1);
}

TEST(Drift, ReportsAreWellFormed) {
  const DriftTrace t = trace("ffffffffffhhhhhhhhhhffffffffff");
  const DriftSummary s = summarize(t);
  const auto json = nlohmann::json::parse(drift_json("moe_drift", t, s));
  EXPECT_EQ(json["phases"].size(), 3u);
  EXPECT_EQ(json["steps"].size(), 30u);
  EXPECT_EQ(drift_plot("heading", t, s).find("nan"), std::string::npos);
  EXPECT_FALSE(summarize(DriftTrace{}).shows);
}

}  // namespace
}  // namespace perf
