// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/gradient_reduce.h"

#include <ctime>

#include "src/algo/experts/prove_experts.h"
#include "src/plan/cost.h"
#include "tests/support/replicas.h"
#include "tests/support/timing.h"

namespace moeccl {
namespace {

using algo::expected_rows;
using algo::GradientReduce;
using algo::ReplicaPlacement;
using plan::LevelTree;
using test::BuiltRows;
using test::random_placement;
using Way = GradientReduce::Way;

GradientReduce make(const ReplicaPlacement& placement, const LevelTree& tree, GradientReduce::Settings settings) {
  auto made = GradientReduce::make(placement, tree, settings);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(*made);
}

TEST(GradientReduce, IsProvedForRandomPlacements) {
  std::mt19937 random(7);
  for (const LevelTree& tree : test::replica_trees()) {
    const uint32_t n = tree.n_ranks;
    for (int i = 0; i < 6; ++i) {
      const uint32_t n_experts = 1 + static_cast<uint32_t>(random() % 8);
      const ReplicaPlacement placement = random_placement(random, n, n_experts, 4, true);
      for (const Way way : {Way::kDirect, Way::kNodes}) {
        const uint64_t count = random() % 60;
        const bool average = random() % 2 == 0;
        // Room for one to three elements of a place, so that shards are cut anywhere.
        const uint64_t places = 2 * uint64_t{n} * (placement.most_experts + n_experts);
        const GradientReduce::Settings settings{count, 64, average, {}, 64u * 2 * places * (1 + random() % 3), way};
        if (way == Way::kNodes && !test::has_nodes(tree)) {
          EXPECT_FALSE(GradientReduce::make(placement, tree, settings).ok()) << "ranks " << n;
          continue;
        }
        const GradientReduce sum = make(placement, tree, settings);
        const Status status = BuiltRows(sum).check(expected_rows(moecclOpReduceGradients, placement, count, average));
        ASSERT_TRUE(status.ok()) << status.message() << "; " << sum.name() << " ranks " << n << " count " << count;
      }
    }
  }
}

// The proof notices any missing signal, wait or sum.
TEST(GradientReduce, LosesItsProofWithoutAnyOneStep) {
  const LevelTree tree = *LevelTree::from_sizes({{"node", {}, {2, 2}}});
  const std::vector<uint32_t> slots(4, 2);
  const std::vector<int32_t> expert = {0, 0, 1, 0, 0, 1, 1, 1};
  const ReplicaPlacement placement = *ReplicaPlacement::make(2, slots, expert);
  for (const Way way : {Way::kDirect, Way::kNodes}) {
    constexpr uint64_t kCount = 24;
    const GradientReduce sum = make(placement, tree, {kCount, 64, true, {}, 64u * 2 * 12, way});
    ASSERT_GT(sum.chunking().n_chunks, 3u);
    const plan::RowExpectation expected = expected_rows(moecclOpReduceGradients, placement, kCount, true);
    const BuiltRows built(sum);
    ASSERT_TRUE(built.check(expected).ok());
    std::string what;
    EXPECT_EQ(test::unnoticed_losses(built, expected, &what), 0) << what;
  }
}

uint64_t between_nodes(const GradientReduce& sum, const LevelTree& tree) {
  const BuiltRows built(sum);
  return plan::price(built.plan, built.bindings, tree, plan::Profile{}).level_bytes[0];
}

// A node sends each expert that it holds once, less the shards that its own ranks have.
TEST(GradientReduce, GradientsLeaveANodeOnce) {
  std::mt19937 random(4);
  uint64_t all_once = 0, all_each = 0;
  for (const LevelTree& tree : test::replica_trees()) {
    if (!test::has_nodes(tree)) continue;
    const uint32_t n = tree.n_ranks;
    const ReplicaPlacement placement = random_placement(random, n, 5, 4, true);
    constexpr uint64_t kCount = 1000, kElement = 4;
    const auto [once, each] = test::node_bytes(placement, tree, kCount * kElement, kElement);
    EXPECT_EQ(between_nodes(make(placement, tree, {kCount, kElement, false, {}, 1 << 20, Way::kNodes}), tree), once)
        << n;
    EXPECT_EQ(between_nodes(make(placement, tree, {kCount, kElement, false, {}, 1 << 20, Way::kDirect}), tree), each);
    all_once += once;
    all_each += each;
  }
  EXPECT_LT(4 * all_once, 3 * all_each) << "experts have several ranks of a node here";
}

// Appendix A.2: with one rank per node, (sN - s) / N experts per rank, which AllReduce and collection do not reach.
TEST(GradientReduce, OneRankANodeSendsWhatThePaperSays) {
  constexpr uint32_t kRanks = 8, kSlots = 2, kExperts = 8;
  constexpr uint64_t kCount = 1 << 12;
  std::vector<int32_t> expert;
  for (uint32_t s = 0; s < kRanks * kSlots; ++s) expert.push_back(static_cast<int32_t>(s % kExperts));
  const ReplicaPlacement placement = *ReplicaPlacement::make(kExperts, std::vector<uint32_t>(kRanks, kSlots), expert);
  const LevelTree tree = *LevelTree::from_sizes({{"node", {}, std::vector<uint32_t>(kRanks, 1)}});
  EXPECT_FALSE(GradientReduce::nodes_save_bytes(placement, tree));
  const GradientReduce sum = make(placement, tree, {kCount, 4, true, {}, 1 << 20});
  EXPECT_EQ(between_nodes(sum, tree), (kSlots * kRanks - kSlots) * kCount * 4);
}

// 100 ms is 20 times what a quiet core needs.
TEST(GradientReduce, PlansOfThousandsOfRanksAreQuick) {
  constexpr uint32_t kRanks = 2048, kExperts = 64;
  const ReplicaPlacement placement = test::spread_placement(kRanks, kExperts);
  for (const LevelTree& tree :
       {LevelTree::flat(kRanks), *LevelTree::from_sizes({{"node", {}, std::vector<uint32_t>(kRanks / 8, 8)}})}) {
    const Way way = test::has_nodes(tree) ? Way::kNodes : Way::kDirect;
    EXPECT_EQ(GradientReduce::nodes_save_bytes(placement, tree), way == Way::kNodes);
    double best_ms = 1e9;
    for (int i = 0; i < 3; ++i) {
      const std::clock_t start = std::clock();
      EXPECT_GT(make(placement, tree, {1 << 20, 4, true, {}, 16 << 20, way}).build(kRanks / 2).program.n_steps(), 0u);
      best_ms = std::min(best_ms, 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC);
    }
    EXPECT_LT(best_ms, 100 * tests::patience()) << tree.depth() << " levels";
  }
}

}  // namespace
}  // namespace moeccl
