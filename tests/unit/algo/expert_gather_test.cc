#include "src/algo/expert_gather.h"

#include "src/plan/cost.h"
#include "tests/support/moe_cluster.h"

namespace moeccl {
namespace {

using algo::Domains;
using algo::ExpertGather;
using algo::Placement;
using test::NamedTree;
using test::Random;

Status prove(const ExpertGather& gather) {
  const plan::Plan plan = gather.build_all();
  const std::vector<plan::Binding> bindings = plan::uniform_bindings(plan);
  const plan::BlockExpectation expected = gather.expectation();
  plan::CheckInput input{plan, bindings};
  input.blocks = &expected;
  return plan::check(input);
}

Placement random_homes(uint32_t n_ranks, Random& random) {
  std::vector<int32_t> owner(1 + random() % (2 * n_ranks));
  for (int32_t& o : owner) o = static_cast<int32_t>(random() % n_ranks);
  return *Placement::make(static_cast<int64_t>(owner.size()), n_ranks, owner.data());
}

TEST(ExpertGatherTest, ProvedForRandomPlacementsAndDomainsOnEveryTree) {
  Random random(31);
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 8; ++round) {
      std::vector<uint32_t> sizes;
      for (uint32_t l = 0; l < t.tree.depth(); ++l) sizes.push_back(1 + random() % 5);
      const Domains domains = *Domains::make(t.tree, sizes);
      const Placement homes = random_homes(t.tree.n_ranks, random);
      for (const bool views : {false, true}) {
        plan::Reach reach;
        reach.staging = views;
        reach.views = views;
        const uint64_t count = round == 0 ? 0 : random() % 9;
        // Staging for one or two elements of each slot, so that experts go in several chunks.
        const uint64_t staging = 64 * 2 * uint64_t{homes.n_experts()} * (1 + random() % 2);
        const auto made = ExpertGather::make(domains, homes, {count, 64, reach, staging});
        ASSERT_TRUE(made.ok()) << made.status().message();
        const Status status = prove(*made);
        ASSERT_TRUE(status.ok()) << status.message() << "; " << t.name << ", " << made->name() << ", round " << round;
      }
    }
  }
}

TEST(ExpertGatherTest, ProvedForEveryCountOfRanks) {
  Random random(32);
  for (uint32_t n = 1; n <= 16; ++n) {
    const plan::LevelTree tree =
        n == 1 ? plan::LevelTree::flat(1) : test::tree_of({{"node", {}, {(n + 1) / 2, n / 2}}});
    std::vector<uint32_t> sizes(tree.depth(), 1 + random() % 4);
    const Domains domains = *Domains::make(tree, sizes);
    const Placement homes = *Placement::make(2 * n + 1, n, nullptr);
    const auto made = ExpertGather::make(domains, homes, {5, 64, {.staging = false}, 1 << 20});
    ASSERT_TRUE(made.ok()) << made.status().message();
    const Status status = prove(*made);
    ASSERT_TRUE(status.ok()) << status.message() << "; " << n << " ranks";
  }
}

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

TEST(ExpertGatherTest, TooLittleStagingIsRefused) {
  const Domains domains = *Domains::make(plan::LevelTree::flat(8), {8});
  const Placement homes = *Placement::make(8, 8, nullptr);
  const auto made = ExpertGather::make(domains, homes, {1 << 20, 1, {.staging = false}, 512});
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("staging"), std::string::npos) << made.status().message();
}

}  // namespace
}  // namespace moeccl
