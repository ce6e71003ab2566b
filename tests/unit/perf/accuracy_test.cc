// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/accuracy.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace perf {
namespace {

// A point with flat 100 us, flat again, hier:1 80 us and auto, in three rounds around each median.
AccuracyPoint point(double auto_us, const std::string& ran, double flat_again_us = 100) {
  const auto rounds = [](double us) { return std::vector<double>{us * 3, us, us / 2}; };
  AccuracyPoint p;
  p.cell.topology = "node:2 gpu:4";
  p.cell.levels = 2;
  p.cell.latency = "2ms";
  p.cell.tokens = 4;
  p.plans = {{"flat", "flat", 90, rounds(100), 3},
             {"hier:1", "hier:1", 80, rounds(80), 3},
             {"auto", ran, 80, rounds(auto_us), 3},
             {kFlatAgain, "flat", 0, rounds(flat_again_us), 3}};
  return p;
}

bool says(const AccuracySummary& s, const std::string& what) {
  for (const std::string& sentence : s.broken)
    if (sentence.find(what) != std::string::npos) return true;
  return false;
}

TEST(Accuracy, ComparesMediansOfTheRounds) {
  const AccuracyPoint p = point(88, "hier:1", 110);
  EXPECT_EQ(p.best().asked, "hier:1");
  EXPECT_DOUBLE_EQ(p.regret(), 1.1);
  EXPECT_DOUBLE_EQ(p.over_flat(), 0.88);
  EXPECT_DOUBLE_EQ(p.flat_over_flat(), 1.1);
  // auto runs the best plan, whatever times its own rounds had.
  EXPECT_DOUBLE_EQ(p.choice_regret(), 1);
  EXPECT_DOUBLE_EQ(point(88, "flat").choice_regret(), 1.25);
}

TEST(Accuracy, FlatsSecondRunIsNoForcedPlanThatCouldBeTheBest) {
  EXPECT_EQ(point(88, "hier:1", 10).best().asked, "hier:1");
}

TEST(Accuracy, LosesToFlatOnlyBeyondWhatFlatItselfVaries) {
  EXPECT_FALSE(point(104, "flat").loses_to_flat());
  EXPECT_TRUE(point(106, "flat").loses_to_flat());
  EXPECT_FALSE(point(106, "flat", 103).loses_to_flat());
  // Noise that made flat's second run the faster one counts as well.
  EXPECT_FALSE(point(106, "flat", 97).loses_to_flat());
}

TEST(Accuracy, ErrorsAreThoseOfForcedPlansWithAPrediction) {
  AccuracyPoint p = point(88, "hier:1");
  EXPECT_EQ(p.errors().size(), 2u);
  EXPECT_NEAR(p.errors()[0], 0.1, 1e-12);
  EXPECT_NEAR(p.errors()[1], 0, 1e-12);
  p.plans[0].predicted_us = 0;
  EXPECT_EQ(p.errors().size(), 1u);
}

TEST(Accuracy, SummaryHasTheGeometricMeanAndNamesTheWorstPoint) {
  AccuracyPoint bad = point(320, "flat");
  bad.cell.routing = "zipf:1";
  const AccuracySummary s = summarize({point(80, "hier:1"), bad}, kGridLimits);
  EXPECT_DOUBLE_EQ(s.regret_mean, 2);
  EXPECT_DOUBLE_EQ(s.regret_worst, 4);
  EXPECT_EQ(s.regret_worst_at, bad.cell.name());
  EXPECT_EQ(s.n_loses, 1);
  EXPECT_TRUE(says(s, "geometric mean is 2.000"));
  EXPECT_TRUE(says(s, bad.cell.name()));
  EXPECT_TRUE(says(s, "at 1 of 2 points"));
}

TEST(Accuracy, NothingIsBrokenWhereTheLimitsHold) {
  const AccuracySummary s = summarize({point(80, "hier:1"), point(84, "hier:1")}, kGridLimits);
  EXPECT_TRUE(s.broken.empty()) << s.broken[0];
  EXPECT_TRUE(says(summarize({}, kGridLimits), "no point"));
}

TEST(Accuracy, WrongRowsAndPredictionsAreBroken) {
  AccuracyPoint p = point(80, "hier:1");
  p.n_wrong = 3;
  for (PlanTimes& t : p.plans) t.predicted_us *= 1.5;
  const AccuracySummary s = summarize({p}, kGridLimits);
  EXPECT_TRUE(says(s, "3 rows"));
  EXPECT_TRUE(says(s, "median error of predictions"));
  for (PlanTimes& t : p.plans) t.predicted_us = 0;
  EXPECT_TRUE(says(summarize({p}, kGridLimits), "no plan has a prediction"));
}

TEST(Accuracy, M1MustNotWaitForMoreThanOneLevel) {
  AccuracyPoint p = point(80, "hier:2");
  EXPECT_FALSE(p.wrong_choice());
  p.cell.of_m1 = true;
  EXPECT_TRUE(says(summarize({p}, kGridLimits), "M1"));
  p.plans[2].ran = "hier:1";
  EXPECT_FALSE(says(summarize({p}, kGridLimits), "M1"));
}

TEST(Accuracy, OnGivenLinksTheChoiceMustBeWithinNoiseOfTheBest) {
  EXPECT_TRUE(says(summarize({point(80, "flat")}, kLinksLimits), "chosen plan"));
  EXPECT_FALSE(says(summarize({point(80, "flat", 120)}, kLinksLimits), "chosen plan"));  // 1.25 < 1.05 * 1.2
  EXPECT_TRUE(summarize({point(200, "hier:1")}, kLinksLimits).broken.empty());
}

TEST(Accuracy, ReportsAreWellFormed) {
  const std::vector<AccuracyPoint> points = {point(80, "hier:1"), point(84, "hier:1")};
  const AccuracySummary s = summarize(points, kGridLimits);
  const auto json = nlohmann::json::parse(accuracy_json("moe_accuracy", points, s, kGridLimits));
  EXPECT_EQ(json["summary"]["points"], 2);
  EXPECT_EQ(json["points"][1]["plans"].size(), 4u);
  EXPECT_EQ(json["points"][0]["chosen"], "hier:1");
  const std::string svg = accuracy_plot("heading", points, s);
  EXPECT_NE(svg.find("EMULATED"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
}

}  // namespace
}  // namespace perf
