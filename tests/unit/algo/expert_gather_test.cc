// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/expert_gather.h"

#include "src/algo/experts/expert_return.h"
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

// 10 Gbit/s and 20 ms one way: together they determine the amount in flight, and the staging limits it. Two chunks of
// 256 KiB per round trip would use 1 % of the line.
template <class Exchange>
void fills_a_long_line() {
  const plan::LinkCost line{20e6, 1.25};
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"dc", line, {1, 1}}});
  const Placement homes = *Placement::make(4, 2, nullptr);
  const Domains domains = *Domains::make(tree, {2, 1});
  ExpertExchange call{100 << 20, 4, {.staging = false}, 128 << 20};
  const double bytes = 2.0 * 4 * (100 << 20), alone_ns = bytes / line.bytes_per_ns;
  const auto priced = [&] {
    const auto exchange = Exchange::make(domains, homes, call);
    EXPECT_TRUE(exchange.ok()) << exchange.status().message();
    const plan::Plan plan = exchange->build_all();
    EXPECT_LE(plan.programs[0].n_slots * plan.programs[0].depth * plan.chunking.chunk * 4, call.staging_bytes);
    return plan::price(plan, tree, {}).total_ns;
  };
  EXPECT_GT(priced(), 10 * alone_ns) << "two small chunks at a time";
  call.round_trip_bytes = {2 * line.alpha_ns * line.bytes_per_ns, 0};
  EXPECT_LT(priced(), alone_ns / 0.8);
}
TEST(ExpertGatherTest, FillsALongLine) { fills_a_long_line<ExpertGather>(); }
TEST(ExpertGatherTest, ReturnFillsALongLineToo) { fills_a_long_line<ExpertReturn>(); }

}  // namespace
}  // namespace moeccl::algo::testing
