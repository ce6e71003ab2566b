// SPDX-License-Identifier: Apache-2.0
#include "src/plan/fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace moeccl::plan {
namespace {

std::vector<Curve::Point> points_on(double alpha_ns, double bytes_per_ns) {
  std::vector<Curve::Point> points;
  for (double bytes = 64; bytes <= (4 << 20); bytes *= 4) points.push_back({bytes, alpha_ns + bytes / bytes_per_ns});
  return points;
}

TEST(Fit, FindsTheLineThatThePointsLieOn) {
  const Curve c = fit_line(points_on(2500, 1.25));
  EXPECT_NEAR(c.line.alpha_ns, 2500, 1);
  EXPECT_NEAR(c.line.bytes_per_ns, 1.25, 1e-3);
  EXPECT_GT(c.r2, 0.9999);
}

// HierMoE's Fig. 9 has r2 above 0.99 with a few per cent of noise.
TEST(Fit, StandsSomeNoise) {
  std::mt19937 random(3);
  std::uniform_real_distribution<double> noise(0.97, 1.03);
  std::vector<Curve::Point> points = points_on(2500, 1.25);
  for (Curve::Point& p : points) p.ns *= noise(random);
  const Curve c = fit_line(points);
  EXPECT_NEAR(c.line.alpha_ns, 2500, 150);
  EXPECT_NEAR(c.line.bytes_per_ns, 1.25, 0.05);
  EXPECT_GT(c.r2, 0.99);
}

TEST(Fit, LetsNoSingleDisturbedPointBendTheLine) {
  std::vector<Curve::Point> points = points_on(2500, 1.25);
  points[3].ns *= 20;
  const Curve c = fit_line(points);
  EXPECT_NEAR(c.line.alpha_ns, 2500, 250);
  EXPECT_NEAR(c.line.bytes_per_ns, 1.25, 0.06);
}

TEST(Fit, NeverGivesNegativeFigures) {
  const Curve falling = fit_line(std::vector<Curve::Point>{{64, 900}, {4096, 500}, {65536, 100}});
  EXPECT_GE(falling.line.alpha_ns, 0);
  EXPECT_GE(falling.line.bytes_per_ns, 0);
  const Curve below = fit_line(std::vector<Curve::Point>{{1000, 1}, {2000, 1001}, {3000, 2001}});
  EXPECT_GE(below.line.alpha_ns, 0);
  EXPECT_EQ(fit_line(std::vector<Curve::Point>{{64, 500}}).r2, 0);
  EXPECT_FALSE(fit_line({}).known());
}

TEST(Fit, JudgesACurveByHowItPredictsPointsThatItDoesNotHave) {
  // Larger messages have twice the rate, which is not a line but a smooth curve.
  std::vector<Curve::Point> points;
  for (double bytes = 64; bytes <= (4 << 20); bytes *= 2)
    points.push_back({bytes, 500 + bytes / (bytes < (1 << 18) ? 5 : 5 + 0.8 * std::log2(bytes / (1 << 18)))});
  EXPECT_GT(curve_r2(points), 0.99);
  points[points.size() - 3].ns *= 2;
  EXPECT_LT(curve_r2(points), 0.99);
  EXPECT_EQ(curve_r2(std::vector<Curve::Point>{{1, 1}, {2, 2}}), 0);
}

TEST(Fit, RoundsThatAreSlowForAllSayNothingOfOne) {
  // The host slows two rounds down by a factor of three. Only the second item scatters, and the third was given up.
  const std::vector<std::vector<double>> rounds = {
      {100, 200, 0}, {300, 600, 0}, {100, 200, 0}, {300, 900, 5000}, {100, 300, 0}};
  const std::vector<Curve::Point> s = summarize_rounds(rounds);
  ASSERT_EQ(s.size(), 3u);
  EXPECT_NEAR(s[1].ns / s[0].ns, 2, 0.5);
  EXPECT_LT(s[0].high_ns / s[0].ns, 1.3);
  EXPECT_GT(s[1].high_ns / s[1].ns, 1.1);
  EXPECT_GT(s[2].ns, 1000);
  EXPECT_EQ(summarize_rounds({{0, 5}, {0, 7}})[0].ns, 0);
  EXPECT_TRUE(summarize_rounds({}).empty());
}

TEST(Curve, AddsWhatItsMeasurementsLeaveOpen) {
  const Curve sure{{}, 1, {{1000, 100, 100}, {4000, 400, 400}}}, unknown{{}, 1, {{1000, 100}, {4000, 400}}};
  EXPECT_DOUBLE_EQ(sure.high_at(2000), sure.at(2000));
  EXPECT_DOUBLE_EQ(unknown.high_at(2000), unknown.at(2000));
  const Curve open{{}, 1, {{1000, 100, 200}, {4000, 400, 800}}};
  for (const double bytes : {10.0, 1000.0, 2000.0, 4000.0, 9000.0})
    EXPECT_NEAR(open.high_at(bytes) / open.at(bytes), 1 + 1.25 / 0.67 / 3, 1e-9) << bytes;
}

TEST(Curve, IsStraightInLogLogBetweenItsPoints) {
  const Curve c{{}, 1, {{1000, 100}, {4000, 400}, {16000, 6400}}};
  EXPECT_DOUBLE_EQ(c.at(1000), 100);
  EXPECT_NEAR(c.at(2000), 200, 1e-9);
  EXPECT_NEAR(c.at(8000), 1600, 1e-9);
  EXPECT_DOUBLE_EQ(c.at(10), 100);
}

TEST(Curve, GoesOnAtThePaceOfItsLastTwoPoints) {
  const Curve c{{}, 1, {{1000, 100}, {2000, 300}}};
  EXPECT_NEAR(c.at(4000), 700, 1e-9);
  // Noise has made two points equal, but the curve must still not be flat.
  const Curve level{{}, 1, {{1000, 300}, {2000, 300}}};
  EXPECT_NEAR(level.at(4000), 450, 1e-9);
}

}  // namespace
}  // namespace moeccl::plan
