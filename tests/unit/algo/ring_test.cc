// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

TEST(Ring, TalksToNeighboursOnly) {
  for (const moecclOp_t op : {moecclOpAllReduce, moecclOpAllGather, moecclOpReduceScatter, moecclOpBroadcast}) {
    const plan::Plan plan = plan_of(op, "ring", shape_of(op, 6, 60), plan::LevelTree::flat(6));
    for (const auto& total : plan.programs[2].totals) EXPECT_TRUE(total.peer == 1 || total.peer == 3) << op;
  }
}

TEST(Ring, CarriesTheLeastBytes) {
  const uint64_t s = 60 * kElement;
  const auto put = [](moecclOp_t op) {
    return traffic(plan_of(op, "ring", shape_of(op, 6, 60), plan::LevelTree::flat(6)), 4).put;
  };
  EXPECT_EQ(put(moecclOpAllReduce), 2 * s * 5 / 6);
  EXPECT_EQ(put(moecclOpAllGather), 5 * s);
  EXPECT_EQ(put(moecclOpReduceScatter), 5 * s);
  EXPECT_EQ(put(moecclOpBroadcast), s);
}

TEST(Ring, DeterministicModeRefusesItsSums) {
  plan::Shape shape = shape_of(moecclOpAllReduce, 6, 60);
  shape.deterministic = true;
  EXPECT_FALSE(find(moecclOpAllReduce, "ring")->applies(shape, plan::LevelTree::flat(6)).ok());
  shape.op = moecclOpAllGather;
  EXPECT_TRUE(find(moecclOpAllGather, "ring")->applies(shape, plan::LevelTree::flat(6)).ok());
}

}  // namespace
}  // namespace moeccl::algo::testing
