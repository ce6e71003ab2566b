// SPDX-License-Identifier: Apache-2.0
#include "transport/common/arrived_ranges.h"

#include <gtest/gtest.h>

namespace moeccl::transport {
namespace {

std::vector<std::pair<uint64_t, uint64_t>> taken(ArrivedRanges& ranges, uint32_t rank) {
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const ArrivedRanges::Range& r : ranges.take(rank)) all.emplace_back(r.offset, r.bytes);
  return all;
}

using Pairs = std::vector<std::pair<uint64_t, uint64_t>>;

TEST(ArrivedRanges, AreMergedByRankUpToTheLargestSize) {
  ArrivedRanges ranges(2, 300);
  // Two puts that arrive in turns, and one of another rank.
  for (const uint64_t at : {0, 1000, 100, 1100, 200, 300}) EXPECT_TRUE(ranges.add(1, at, 100));
  EXPECT_TRUE(ranges.add(0, 400, 100));
  EXPECT_EQ(taken(ranges, 1), (Pairs{{0, 300}, {1000, 200}, {300, 100}}));
  EXPECT_EQ(taken(ranges, 0), (Pairs{{400, 100}}));
  EXPECT_TRUE(taken(ranges, 0).empty());
}

TEST(ArrivedRanges, OfOneRankHaveALimit) {
  ArrivedRanges ranges(1);
  uint64_t n = 0;
  while (n < 1 << 20 && ranges.add(0, 10 * n, 1)) ++n;
  EXPECT_EQ(n, 1u << 16);
  EXPECT_EQ(ranges.take(0).size(), n);
  EXPECT_TRUE(ranges.add(0, 0, 1));
}

}  // namespace
}  // namespace moeccl::transport
