#include "src/plan/fit.h"

#include <gtest/gtest.h>

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
  // Two points that noise has made equal: still not free of charge.
  const Curve level{{}, 1, {{1000, 300}, {2000, 300}}};
  EXPECT_NEAR(level.at(4000), 450, 1e-9);
}

}  // namespace
}  // namespace moeccl::plan
