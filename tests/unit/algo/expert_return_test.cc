// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/expert_return.h"

#include "src/algo/experts/expert_gather.h"
#include "src/plan/cost.h"
#include "tests/unit/algo/expert_exchange.h"

namespace moeccl::algo::testing {
namespace {

INSTANTIATE_TYPED_TEST_SUITE_P(Return, ExpertExchangeTest, ExpertReturn);

// The return carries the gather's bytes back over the same links, level by level.
TEST(ExpertReturnTest, CarriesTheGathersBytes) {
  const plan::LevelTree tree = test::tree_of({{"dc", {}, {4, 4}}});
  const Placement homes = *Placement::make(8, 8, nullptr);
  const ExpertExchange call{1000, 4, {.staging = false}, 1 << 20};
  for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{2, 4}, {1, 3}, {2, 1}, {1, 1}}) {
    const Domains domains = *Domains::make(tree, sizes);
    const auto there = ExpertGather::make(domains, homes, call);
    const auto back = ExpertReturn::make(domains, homes, call);
    ASSERT_TRUE(there.ok() && back.ok());
    EXPECT_EQ(plan::price(back->build_all(), tree, {}).level_bytes,
              plan::price(there->build_all(), tree, {}).level_bytes);
  }
}

TEST(ExpertReturnTest, DeterministicSumsDoNotDependOnReach) {
  const Domains domains = *Domains::make(plan::LevelTree::flat(4), {4});
  const Placement homes = *Placement::make(4, 4, nullptr);
  ExpertExchange call{16, 4, {.staging = true, .views = true}, 1 << 20};
  call.way = ExpertExchange::Way::kDirect;
  EXPECT_TRUE(ExpertReturn::make(domains, homes, call).ok());
  call.deterministic = true;
  EXPECT_EQ(ExpertReturn::make(domains, homes, call).status().code(), moecclUnsupported);
}

TEST(ExpertReturnTest, MoreSourcesThanAReductionMayHaveAreRefused) {
  const Domains domains = *Domains::make(plan::LevelTree::flat(8), {8});
  const Placement homes = *Placement::make(8, 8, nullptr);
  ExpertExchange call{1 << 10, 1, {.staging = false}, 1 << 20};
  call.most_sources = 8;
  EXPECT_TRUE(ExpertReturn::make(domains, homes, call).ok());
  call.most_sources = 7;
  const auto many = ExpertReturn::make(domains, homes, call);
  ASSERT_FALSE(many.ok());
  EXPECT_NE(many.status().message().find("7 ranks"), std::string::npos) << many.status().message();
}

}  // namespace
}  // namespace moeccl::algo::testing
