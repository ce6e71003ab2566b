// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_move.h"

#include <ctime>

#include "src/algo/experts/prove_experts.h"
#include "src/plan/checker.h"
#include "src/plan/cost.h"
#include "tests/support/replicas.h"
#include "tests/support/timing.h"

namespace moeccl {
namespace {

using algo::ReplicaMove;
using algo::ReplicaPlacement;
using test::random_placement;

using Built = test::BuiltRows;
using Way = ReplicaMove::Way;

TEST(ReplicaMove, IsProvedForRandomPlacements) {
  std::mt19937 random(9);
  for (const plan::LevelTree& tree : test::replica_trees()) {
    const uint32_t n = tree.n_ranks;
    for (int i = 0; i < 8; ++i) {
      const uint32_t n_experts = 1 + static_cast<uint32_t>(random() % 12);
      const ReplicaPlacement placement = random_placement(random, n, n_experts, 4, true);
      for (const auto& [op, way] : {std::pair{moecclOpCollectGradients, Way::kDirect},
                                    {moecclOpPlaceWeights, Way::kDirect},
                                    {moecclOpPlaceWeights, Way::kNodes}}) {
        if (way == Way::kNodes && !test::has_nodes(tree)) continue;
        const uint64_t count = random() % 60;
        // Places of one to three elements, so that pieces are cut anywhere.
        const uint64_t places = op == moecclOpPlaceWeights ? uint64_t{n} * placement.most_experts : n_experts;
        const ReplicaMove::Settings settings{op, count, 64, {}, 64u * 2 * places * (1 + random() % 3), way};
        auto made = ReplicaMove::make(placement, tree, settings);
        ASSERT_TRUE(made.ok()) << made.status().message();
        const Built built(*made);
        const plan::RowExpectation expected = algo::expected_rows(op, placement, count, false);
        const Status status = plan::check({built.plan, built.bindings, &expected});
        ASSERT_TRUE(status.ok()) << status.message() << "; op " << op << " ranks " << n << " count " << count;
      }
    }
  }
}

// Placement of weights: a node receives each expert that it holds once, less the shards that its own ranks have.
TEST(ReplicaMove, WeightsEnterANodeOnce) {
  std::mt19937 random(4);
  uint64_t all_once = 0, all_each = 0;
  for (const plan::LevelTree& tree : test::replica_trees()) {
    if (!test::has_nodes(tree)) continue;
    const uint32_t n = tree.n_ranks;
    const ReplicaPlacement placement = random_placement(random, n, 5, 4, true);
    constexpr uint64_t kCount = 1000, kElement = 4;
    auto made = ReplicaMove::make(placement, tree, {moecclOpPlaceWeights, kCount, kElement, {}, 1 << 20, Way::kNodes});
    ASSERT_TRUE(made.ok()) << made.status().message();
    const Built built(*made);
    const plan::Cost cost = plan::price(built.plan, built.bindings, tree, plan::Profile{});
    const auto [once, each] = test::node_bytes(placement, tree, kCount * kElement, kElement);
    EXPECT_EQ(cost.level_bytes[0], once) << "ranks " << n;
    all_once += once;
    all_each += each;
  }
  EXPECT_LT(4 * all_once, 3 * all_each) << "experts have several ranks of a node here";
}

// The cost of a plan depends on what it moves. Looking at all pairs of ranks and experts took 1.2 s at this size; 100
// ms is 20 times the need of a quiet core.
TEST(ReplicaMove, PlansOfThousandsOfRanksAreQuick) {
  constexpr uint32_t kRanks = 2048, kExperts = 64;
  const ReplicaPlacement placement = test::spread_placement(kRanks, kExperts);
  for (const plan::LevelTree& tree :
       {plan::LevelTree::flat(kRanks),
        *plan::LevelTree::from_sizes({{"node", {}, std::vector<uint32_t>(kRanks / 8, 8)}})}) {
    for (const moecclOp_t op : {moecclOpCollectGradients, moecclOpPlaceWeights}) {
      const Way way = op == moecclOpPlaceWeights && test::has_nodes(tree) ? Way::kNodes : Way::kDirect;
      double best_ms = 1e9;
      for (int i = 0; i < 3; ++i) {
        const std::clock_t start = std::clock();
        auto made = ReplicaMove::make(placement, tree, {op, 1 << 20, 4, {}, 16 << 20, way});
        ASSERT_TRUE(made.ok()) << made.status().message();
        EXPECT_GT(made->build(kRanks / 2).program.n_steps(), 0u);
        best_ms = std::min(best_ms, 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
      }
      EXPECT_LT(best_ms, 100 * tests::patience()) << "op " << op << ", " << tree.depth() << " levels";
    }
  }
}

// Algorithm 2: the own replica first, else the replicas in turn, so that no source serves more than its share, rounded
// up.
TEST(ReplicaMove, GradientSourcesAreBalanced) {
  const std::vector<uint32_t> slots(16, 1);
  std::vector<int32_t> expert(16, -1);
  for (const size_t r : {1u, 5u, 6u}) expert[r] = 0;
  const ReplicaPlacement placement = *ReplicaPlacement::make(1, slots, expert);
  std::vector<uint32_t> served(16, 0);
  for (uint32_t r = 0; r < 16; ++r) ++served[algo::gradient_source(placement, 0, r)];
  EXPECT_EQ(served[1] + served[5] + served[6], 16u);
  for (const size_t r : {1u, 5u, 6u}) {
    EXPECT_GE(served[r], 4u);
    EXPECT_LE(served[r], 7u);
    EXPECT_EQ(algo::gradient_source(placement, 0, static_cast<uint32_t>(r)), r);
  }
}

TEST(ReplicaMove, AnExpertWithoutReplicaHasNoGradient) {
  const std::vector<uint32_t> slots = {1, 1};
  const std::vector<int32_t> expert = {0, 0};
  const ReplicaPlacement placement = *ReplicaPlacement::make(2, slots, expert);
  const auto made =
      ReplicaMove::make(placement, plan::LevelTree::flat(2), {moecclOpCollectGradients, 4, 4, {}, 1 << 20});
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("expert 1"), std::string::npos) << made.status().message();
  EXPECT_TRUE(ReplicaMove::make(placement, plan::LevelTree::flat(2), {moecclOpPlaceWeights, 4, 4, {}, 1 << 20}).ok());
}

}  // namespace
}  // namespace moeccl
