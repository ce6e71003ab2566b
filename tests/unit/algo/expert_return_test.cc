#include "src/algo/expert_return.h"

#include "src/algo/expert_gather.h"
#include "src/plan/cost.h"
#include "tests/support/moe_cluster.h"

namespace moeccl {
namespace {

using algo::Domains;
using algo::ExpertReturn;
using algo::Placement;
using test::NamedTree;
using test::Random;

Status prove(const ExpertReturn& back) {
  const plan::Plan plan = back.build_all();
  const std::vector<plan::Binding> bindings = plan::uniform_bindings(plan);
  const plan::BlockExpectation expected = back.expectation();
  plan::CheckInput input{plan, bindings};
  input.blocks = &expected;
  return plan::check(input);
}

TEST(ExpertReturnTest, ProvedForRandomPlacementsAndDomainsOnEveryTree) {
  Random random(41);
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 8; ++round) {
      std::vector<uint32_t> sizes;
      for (uint32_t l = 0; l < t.tree.depth(); ++l) sizes.push_back(1 + random() % 5);
      const Domains domains = *Domains::make(t.tree, sizes);
      std::vector<int32_t> owner(1 + random() % (2 * t.tree.n_ranks));
      for (int32_t& o : owner) o = static_cast<int32_t>(random() % t.tree.n_ranks);
      const Placement homes = *Placement::make(static_cast<int64_t>(owner.size()), t.tree.n_ranks, owner.data());
      for (const bool views : {false, true}) {
        plan::Reach reach;
        reach.staging = reach.views = views;
        const uint64_t count = round == 0 ? 0 : random() % 9;
        // Staging for one or two elements of each slot, so that experts go in several chunks.
        const uint64_t staging = 64 * 4 * uint64_t{homes.n_experts()} * t.tree.n_ranks * (1 + random() % 2);
        const auto made = ExpertReturn::make(domains, homes, {count, 64, reach, staging, round % 2 == 0, 0});
        ASSERT_TRUE(made.ok()) << made.status().message();
        EXPECT_EQ(made->name(), std::string(views && round % 2 != 0 ? "direct" : "staged"));
        const Status status = prove(*made);
        ASSERT_TRUE(status.ok()) << status.message() << "; " << t.name << ", " << made->name() << ", round " << round;
      }
    }
  }
}

TEST(ExpertReturnTest, ProvedForEveryCountOfRanks) {
  Random random(42);
  for (uint32_t n = 1; n <= 16; ++n) {
    const plan::LevelTree tree =
        n == 1 ? plan::LevelTree::flat(1) : test::tree_of({{"node", {}, {(n + 1) / 2, n / 2}}});
    std::vector<uint32_t> sizes(tree.depth(), 1 + random() % 4);
    const Domains domains = *Domains::make(tree, sizes);
    const Placement homes = *Placement::make(2 * n + 1, n, nullptr);
    const auto made = ExpertReturn::make(domains, homes, {5, 64, {.staging = false}, 1 << 20, false, 0});
    ASSERT_TRUE(made.ok()) << made.status().message();
    const Status status = prove(*made);
    ASSERT_TRUE(status.ok()) << status.message() << "; " << n << " ranks";
  }
}

// What the gather carried there comes back over the same links, level by level.
TEST(ExpertReturnTest, CarriesTheGathersBytes) {
  const plan::LevelTree tree = test::tree_of({{"dc", {}, {4, 4}}});
  const Placement homes = *Placement::make(8, 8, nullptr);
  for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{2, 4}, {1, 3}, {2, 1}, {1, 1}}) {
    const Domains domains = *Domains::make(tree, sizes);
    const auto there = algo::ExpertGather::make(domains, homes, {1000, 4, {.staging = false}, 1 << 20});
    const auto back = ExpertReturn::make(domains, homes, {1000, 4, {.staging = false}, 1 << 20, false, 0});
    ASSERT_TRUE(there.ok() && back.ok());
    EXPECT_EQ(plan::price(back->build_all(), tree, {}).level_bytes,
              plan::price(there->build_all(), tree, {}).level_bytes);
  }
}

TEST(ExpertReturnTest, WhatDoesNotFitIsRefused) {
  const Domains domains = *Domains::make(plan::LevelTree::flat(8), {8});
  const Placement homes = *Placement::make(8, 8, nullptr);
  const auto small = ExpertReturn::make(domains, homes, {1 << 20, 1, {.staging = false}, 512, false, 0});
  ASSERT_FALSE(small.ok());
  EXPECT_NE(small.status().message().find("staging"), std::string::npos) << small.status().message();
  const auto many = ExpertReturn::make(domains, homes, {1 << 10, 1, {.staging = false}, 1 << 20, false, 7});
  ASSERT_FALSE(many.ok());
  EXPECT_NE(many.status().message().find("7 ranks"), std::string::npos) << many.status().message();
}

}  // namespace
}  // namespace moeccl
