// SPDX-License-Identifier: Apache-2.0
#include "perf/common/stats.h"

#include <gtest/gtest.h>

#include <numeric>

namespace perf {
namespace {

TEST(Stats, PercentilesAreNearestRank) {
  std::vector<double> samples(100);
  std::iota(samples.begin(), samples.end(), 1.0);
  std::reverse(samples.begin(), samples.end());
  const Stats s = summarize(samples);
  EXPECT_EQ(s.min, 1);
  EXPECT_EQ(s.max, 100);
  EXPECT_EQ(s.p50, 50.5);
  EXPECT_EQ(s.p95, 95);
  EXPECT_EQ(s.p99, 99);
  EXPECT_DOUBLE_EQ(s.mean, 50.5);
}

TEST(Stats, FewSamplesHaveTheMaximumAsP99) {
  const Stats s = summarize({3, 1, 2});
  EXPECT_EQ(s.p50, 2);
  EXPECT_EQ(s.p99, 3);
  EXPECT_EQ(summarize({5}).p50, 5);
  EXPECT_EQ(median({}), 0);
}

}  // namespace
}  // namespace perf
