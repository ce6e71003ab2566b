// SPDX-License-Identifier: Apache-2.0
#include "src/algo/tensor_blocks.h"

#include "src/plan/cost.h"
#include "tests/support/replicas.h"

namespace moeccl {
namespace {

using algo::TensorBlocks;
using plan::LevelTree;
using test::BuiltRows;

// Draws blocks of any size, including empty ones.
std::vector<uint64_t> draw(std::mt19937& random, uint32_t groups, uint32_t most) {
  std::vector<uint64_t> counts(size_t{groups} * groups);
  for (uint64_t& n : counts) n = random() % 4 == 0 ? 0 : random() % (most + 1);
  return counts;
}

TEST(TensorBlocks, IsProvedForRandomBlocks) {
  std::mt19937 random(5);
  for (const LevelTree& tree : test::replica_trees()) {
    for (int i = 0; i < 6; ++i) {
      const std::vector<uint64_t> counts = draw(random, tree.n_tensor_groups(), 40);
      const uint64_t slots = 2 * uint64_t{tree.n_tensor_groups()} * tree.n_ranks;
      auto made = TensorBlocks::make(tree, {counts, 64, {}, 64 * slots * (1 + random() % 3)});
      ASSERT_TRUE(made.ok()) << made.status().message();
      const Status status = BuiltRows(*made).check(made->expected());
      ASSERT_TRUE(status.ok()) << status.message() << "; ranks " << tree.n_ranks;
    }
  }
}

TEST(TensorBlocks, IsProvedAtRunTimeWhateverItsSize) {
  std::mt19937 random(8);
  for (const LevelTree& tree : test::replica_trees()) {
    for (const uint32_t most : {3u, 1u << 20}) {
      const Status status = algo::prove_tensor_blocks(tree, draw(random, tree.n_tensor_groups(), most), {});
      ASSERT_TRUE(status.ok()) << status.message() << "; ranks " << tree.n_ranks;
    }
  }
}

TEST(TensorBlocks, LosesItsProofWithoutAnyOneStep) {
  const LevelTree tree = *LevelTree::from_sizes({{"node", {}, {2, 3}}});
  const std::vector<uint64_t> counts = {5, 11, 14, 3};
  auto made = TensorBlocks::make(tree, {counts, 64, {}, 64 * 2 * 3});
  ASSERT_TRUE(made.ok()) << made.status().message();
  ASSERT_GT(made->chunking().n_chunks, 3u);
  const plan::RowExpectation expected = made->expected();
  const BuiltRows built(*made);
  ASSERT_TRUE(built.check(expected).ok());
  std::string what;
  EXPECT_EQ(test::unnoticed_losses(built, expected, &what), 0) << what;
}

// If every rank sent all its data, t copies of each block would cross.
TEST(TensorBlocks, EachElementCrossesBetweenNodesOnce) {
  std::mt19937 random(6);
  for (const std::vector<uint32_t>& sizes : {std::vector<uint32_t>{8, 8}, {4, 4, 4}, {7, 8}, {1, 4, 3}}) {
    const LevelTree tree = *LevelTree::from_sizes({{"node", {}, sizes}});
    const auto e = static_cast<uint32_t>(sizes.size());
    const std::vector<uint64_t> counts = draw(random, e, 10'007);
    auto made = TensorBlocks::make(tree, {counts, 2, {}, 1 << 20});
    ASSERT_TRUE(made.ok()) << made.status().message();
    const BuiltRows built(*made);
    const plan::Cost cost = plan::price(built.plan, built.bindings, tree, plan::Profile{});
    uint64_t once = 0, inside = 0;
    for (uint32_t s = 0; s < e; ++s)
      for (uint32_t d = 0; d < e; ++d) {
        if (s != d) once += 2 * counts[s * e + d];
        if (s != d) inside += 2 * counts[s * e + d] * (sizes[d] - 1);
      }
    EXPECT_EQ(cost.level_bytes[0], once);
    EXPECT_EQ(cost.level_bytes[1], inside);
  }
}

}  // namespace
}  // namespace moeccl
