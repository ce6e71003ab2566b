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

// Every rank of a group gets all blocks; part k of a block comes from the rank that sends to rank k of the group.
plan::RowExpectation expectation(const TensorBlocks& plan, const LevelTree& tree, const std::vector<uint64_t>& counts,
                                 uint32_t element_bytes) {
  const algo::Nodes nodes(tree.tensor_groups(), tree.n_tensor_groups());
  const uint32_t e = nodes.n_nodes();
  plan::RowExpectation expected;
  for (uint32_t r = 0; r < tree.n_ranks; ++r) {
    expected.input_rows.push_back(plan.input_elements(r));
    std::vector<plan::ExpectedRow>& rows = expected.output.emplace_back();
    const uint32_t mine = nodes.node_of(r), t = nodes.size(mine);
    for (uint32_t from = 0; from < e; ++from) {
      uint64_t first = 0;
      for (uint32_t d = 0; d < mine; ++d) first += counts[from * e + d];
      const uint64_t length = counts[from * e + mine];
      for (uint32_t k = 0; k < (from == mine ? 1 : t); ++k) {
        const plan::Range part = plan::part_range(length, element_bytes, k, from == mine ? 1 : t);
        const uint32_t sender = from == mine ? r : nodes.members(from)[k % nodes.size(from)];
        for (uint64_t i = 0; i < part.length; ++i)
          rows.push_back({{{sender, static_cast<uint32_t>(first + part.offset + i), 1}}, false});
      }
    }
  }
  return expected;
}

TEST(TensorBlocks, IsProvedForRandomBlocks) {
  std::mt19937 random(5);
  for (const LevelTree& tree : test::replica_trees()) {
    for (int i = 0; i < 6; ++i) {
      const std::vector<uint64_t> counts = draw(random, tree.n_tensor_groups(), 40);
      const uint64_t slots = 2 * uint64_t{tree.n_tensor_groups()} * tree.n_ranks;
      auto made = TensorBlocks::make(tree, {counts, 64, {}, 64 * slots * (1 + random() % 3)});
      ASSERT_TRUE(made.ok()) << made.status().message();
      const Status status = BuiltRows(*made).check(expectation(*made, tree, counts, 64));
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
  const plan::RowExpectation expected = expectation(*made, tree, counts, 64);
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
