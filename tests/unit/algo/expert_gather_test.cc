// SPDX-License-Identifier: Apache-2.0
#include "src/algo/expert_gather.h"

#include "src/plan/cost.h"
#include "tests/unit/algo/expert_exchange.h"

namespace moeccl::algo::testing {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Gather, ExpertExchangeTest, ExpertGather);

// An expert crosses the outer level once for each group of its domain, whatever the inner domains are.
TEST(ExpertGatherTest, OuterLevelsCarryAnExpertOnce) {
  const plan::LevelTree tree = test::tree_of({{"dc", {}, {4, 4}}});
  const Placement homes = *Placement::make(8, 8, nullptr);
  const Domains domains = *Domains::make(tree, {2, 4});
  const auto gather = ExpertGather::make(domains, homes, {1000, 1, {.staging = false}, 1 << 20});
  ASSERT_TRUE(gather.ok());
  const plan::Cost cost = plan::price(gather->build_all(), tree, {});
  EXPECT_EQ(cost.level_bytes[0], 8u * 1000);          // each of 8 experts into the other data centre
  EXPECT_EQ(cost.level_bytes[1], 8u * 2 * 3 * 1000);  // each rank passes its two on to three others
}

}  // namespace
}  // namespace moeccl::algo::testing
