// SPDX-License-Identifier: Apache-2.0
#include "src/plan/correct.h"

#include <gtest/gtest.h>

namespace moeccl::plan {
namespace {

Profile sample() {
  Profile p;
  for (const char* name : {"ring", "flat"}) {
    PlanFit f;
    f.algorithm = name;
    f.reach = 5;
    f.curve.points = {{1024, 1000}, {16384, 4000}, {262144, 50'000}, {1 << 22, 800'000}};
    p.plans.push_back(f);
  }
  return p;
}

Observation ring(double bytes, double took_ns) { return {moecclOpAllReduce, "ring", 5, bytes, took_ns}; }

// Returns how often the profile changed.
int observe(Corrector& c, Profile& p, const Observation& o, size_t times) {
  int changed = 0;
  for (size_t i = 0; i < times; ++i) changed += c.observe(p, o) ? 1 : 0;
  return changed;
}

TEST(Corrector, RaisesAPlanThatTakesLongerThanPredicted) {
  Profile p = sample();
  Corrector c;
  EXPECT_EQ(observe(c, p, ring(16384, 9000), 8 * Corrector::kWindow), 1);  // then the error is small enough
  EXPECT_NEAR(p.plans[0].curve.at(16384), 8000, 1);
  // Distant sizes and other plans stay unchanged.
  EXPECT_DOUBLE_EQ(p.plans[0].curve.at(1 << 22), 800'000);
  EXPECT_DOUBLE_EQ(p.plans[1].curve.at(16384), 4000);
}

TEST(Corrector, TakesBackWhatHasPassed) {
  Profile p = sample();
  Corrector c;
  observe(c, p, ring(16384, 9000), 4 * Corrector::kWindow);
  ASSERT_NEAR(p.plans[0].curve.at(16384), 8000, 1);
  observe(c, p, ring(16384, 4000), 8 * Corrector::kWindow);
  EXPECT_NEAR(p.plans[0].curve.at(16384), 4000, 1);
  // Times below the measured ones are never believed.
  EXPECT_EQ(observe(c, p, ring(16384, 100), 8 * Corrector::kWindow), 0);
}

TEST(Corrector, ForgivesDisturbancesAndSmallErrors) {
  Profile p = sample();
  Corrector c;
  for (int i = 0; i < 200; ++i) EXPECT_FALSE(c.observe(p, ring(16384, i % 3 == 0 ? 4e6 : 4800)));
  EXPECT_EQ(p.hash(), sample().hash());
}

TEST(Corrector, IsBounded) {
  Profile p = sample();
  Corrector c;
  observe(c, p, ring(16384, 1e15), 100 * Corrector::kWindow);
  EXPECT_NEAR(p.plans[0].curve.at(16384), 4000 * Corrector::kMostInAll, 1);
  observe(c, p, ring(16384, 1), 100 * Corrector::kWindow);
  EXPECT_NEAR(p.plans[0].curve.at(16384), 4000, 1);
}

TEST(Corrector, LeavesWhatItDoesNotKnow) {
  Profile p = sample();
  Corrector c;
  Observation o = ring(16384, 1e9);
  o.reach = 7;
  EXPECT_EQ(observe(c, p, o, 50), 0);
  o = ring(16384, 0);
  EXPECT_EQ(observe(c, p, o, 50), 0);
  EXPECT_EQ(p.hash(), sample().hash());
}

TEST(Corrector, SameObservationsGiveTheSameProfile) {
  Profile p = sample(), q = sample();
  Corrector c, d;
  bool any = false;
  for (int i = 0; i < 1000; ++i) {
    const Observation o = ring(1000.0 * (1 + i % 7), 500.0 * (i % 31));
    any |= c.observe(p, o);
    d.observe(q, o);
  }
  EXPECT_TRUE(any);
  EXPECT_EQ(p.hash(), q.hash());
}

}  // namespace
}  // namespace moeccl::plan
