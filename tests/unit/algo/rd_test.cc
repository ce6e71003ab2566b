// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

uint64_t put(uint32_t n, uint32_t rank) {
  return traffic(plan_of(moecclOpAllReduce, "rd", shape_of(moecclOpAllReduce, n, 10), plan::LevelTree::flat(n)), rank)
      .put;
}

TEST(RecursiveDoubling, ExchangesLog2Times) {
  for (uint32_t rank = 0; rank < 8; ++rank) EXPECT_EQ(put(8, rank), 3 * 10 * kElement);
}

TEST(RecursiveDoubling, RanksBeyondAPowerOfTwoFoldOntoOthers) {
  EXPECT_EQ(put(6, 0), 10 * kElement);      // folds onto rank 1
  EXPECT_EQ(put(6, 1), 3 * 10 * kElement);  // two exchanges and the result for rank 0
  EXPECT_EQ(put(6, 5), 2 * 10 * kElement);
}

// Partners must sum in the same order; otherwise their results differ in the last bit.
TEST(RecursiveDoubling, PartnersSumInTheSameOrder) {
  const plan::Plan plan =
      plan_of(moecclOpAllReduce, "rd", shape_of(moecclOpAllReduce, 2, 10), plan::LevelTree::flat(2));
  for (const plan::Program& program : plan.programs) {
    for (const plan::Step& step : program.lanes[0].steps) {
      if (step.kind != plan::StepKind::kReduce) continue;
      EXPECT_EQ(program.srcs[step.first_src + program.rank].buffer, plan::Buffer::kInput) << program.rank;
    }
  }
}

}  // namespace
}  // namespace moeccl::algo::testing
