// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr uint64_t kElement = 64;

TEST(Flat, OnlyPuts) {
  for (int op = moecclOpAllReduce; op <= moecclOpScatter; ++op) {
    plan::Shape shape = shape_of(static_cast<moecclOp_t>(op), 5, 40);
    shape.reach = {false, false, false};
    const plan::Plan plan = plan_of(shape.op, "flat", shape, plan::LevelTree::flat(5));
    for (uint32_t rank = 0; rank < 5; ++rank) EXPECT_EQ(traffic(plan, rank).pulled, 0u) << op;
  }
}

TEST(Flat, AllReducePutsEachPartTwice) {
  const plan::Plan plan =
      plan_of(moecclOpAllReduce, "flat", shape_of(moecclOpAllReduce, 4, 40), plan::LevelTree::flat(4));
  const Traffic t = traffic(plan, 3);
  EXPECT_EQ(t.put, 2 * 40 * kElement * 3 / 4);
  EXPECT_EQ(t.signals, 6u);
}

TEST(Flat, AllToAllSendsOneBlockToEach) {
  const uint64_t s = 40 * kElement;
  const plan::Plan plan =
      plan_of(moecclOpAllToAll, "flat", shape_of(moecclOpAllToAll, 4, 40), plan::LevelTree::flat(4));
  EXPECT_EQ(traffic(plan, 0), (Traffic{3 * s, 0, 4 * s, 3, 3}));
}

}  // namespace
}  // namespace moeccl::algo::testing
