// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

Traffic of(uint32_t n, uint64_t count, uint32_t rank) {
  return traffic(plan_of(moecclOpAllReduce, "halving", shape_of(moecclOpAllReduce, n, count), plan::LevelTree::flat(n)),
                 rank);
}

uint32_t exchanges(uint32_t n, uint32_t rank) {
  const plan::Plan plan =
      plan_of(moecclOpAllReduce, "halving", shape_of(moecclOpAllReduce, n, 64), plan::LevelTree::flat(n));
  uint32_t waits = 0;
  for (const plan::Step& step : plan.programs[rank].lanes[0].steps) waits += step.kind == plan::StepKind::kWait;
  return waits;
}

TEST(Halving, CarriesTheBytesOfARing) {
  for (uint32_t rank = 0; rank < 8; ++rank) EXPECT_EQ(of(8, 80, rank).put, 2 * 80 * 7 / 8 * kElement);
}

TEST(Halving, MeetsTwoPartnersForEachBitOfTheRank) {
  for (const uint32_t n : {2u, 4u, 8u, 16u}) {
    uint32_t log = 0;
    while ((1u << log) < n) ++log;
    EXPECT_EQ(exchanges(n, n - 1), 2 * log) << n;
  }
}

TEST(Halving, RanksBeyondAPowerOfTwoFoldOntoOthers) {
  EXPECT_EQ(of(6, 80, 0).put, 80 * kElement);                     // folds onto rank 1
  EXPECT_EQ(of(6, 80, 1).put, (2 * 80 * 3 / 4 + 80) * kElement);  // its exchanges and the result for rank 0
  EXPECT_EQ(of(6, 80, 5).put, 2 * 80 * 3 / 4 * kElement);
}

}  // namespace
}  // namespace moeccl::algo::testing
