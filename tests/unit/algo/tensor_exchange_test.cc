// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "src/plan/checker.h"
#include "src/plan/cost.h"
#include "tests/unit/algo/bytes.h"

namespace moeccl::algo::testing {
namespace {

constexpr const char* kVariants[] = {"baseline", "o1", "o2", "o3", "lean"};
constexpr uint64_t kElement = 64;

plan::Plan plan_for(const char* name, uint64_t count, const plan::LevelTree& tree, plan::PipelineChunks chunks = {}) {
  plan::Shape shape = shape_of(moecclOpTensorAllToAll, tree.n_ranks, count);
  shape.reach = {false, false, false};
  shape.pipeline_chunks = chunks;
  return plan_of(moecclOpTensorAllToAll, name, shape, tree);
}

uint64_t between_nodes(const char* name, uint64_t count, const plan::LevelTree& tree) {
  return plan::price(plan_for(name, count, tree), tree, plan::Profile{}).level_bytes[0];
}

// Eq. 8 and 9: the bytes that cross between nodes and those that a rank puts inside its node, for e = 3, t = 4.
TEST(TensorExchange, BytesAreThoseOfTheEquations) {
  const plan::LevelTree tree = nodes({4, 4, 4});
  const uint64_t count = 96, block = count * kElement, e = 3, t = 4;
  EXPECT_EQ(between_nodes("baseline", count, tree), e * t * (e - 1) * block);
  for (const char* name : {"o1", "o2", "o3", "lean"}) {
    EXPECT_EQ(between_nodes(name, count, tree), e * (e - 1) * block) << name;
    const Traffic mine = traffic(plan_for(name, count, tree, {1, 1, 1}), 5);
    const uint64_t gathered = std::string(name) == "lean" ? e - 1 : e;
    EXPECT_EQ(mine.put, (e - 1) * block / t + gathered * block / t * (t - 1)) << name;
  }
}

// On nodes of 7 and 8 ranks, a block still crosses once.
TEST(TensorExchange, UnevenNodesSendEachByteOnce) {
  for (const auto& tree : {nodes({7, 8}), nodes({1, 4, 3}), nodes({1, 1, 2})}) {
    const uint64_t e = tree.levels[0].n_groups;
    for (const char* name : {"o1", "o2", "o3", "lean"})
      EXPECT_EQ(between_nodes(name, 100, tree), e * (e - 1) * 100 * kElement) << name;
  }
}

TEST(TensorExchange, IsProvedForUnevenCornersAsTheBuilderCutsThem) {
  for (const auto& tree : {nodes({2, 8}), nodes({7, 8}), nodes({8, 8}), nodes({1, 4, 3}), nodes({5, 1, 2}), nodes({3}),
                           nodes({1, 1}), plan::LevelTree::flat(4)}) {
    for (const char* name : kVariants) {
      for (const uint64_t count : {0, 1, 7, 61, 257}) {
        for (const uint32_t n : {1u, 2u, 3u, 7u}) {
          const plan::Plan plan = plan_for(name, count, tree, {n, n, n});
          const Status status = plan::check(plan);
          ASSERT_TRUE(status.ok()) << name << ", count " << count << ", " << n << " chunks: " << status.message();
        }
      }
    }
  }
}

TEST(TensorExchange, ChunksAreAsManyAsAskedFor) {
  const plan::LevelTree tree = nodes({4, 4});
  EXPECT_EQ(plan_for("o2", 1024, tree, {5, 6, 7}).chunking.n_chunks, 5u);
  EXPECT_EQ(plan_for("o3", 1024, tree, {5, 6, 7}).chunking.n_chunks, 6u);
  EXPECT_EQ(plan_for("lean", 1024, tree, {5, 6, 7}).chunking.n_chunks, 7u);
  EXPECT_EQ(plan_for("o1", 1024, tree, {5, 6, 7}).chunking.n_chunks, 1u);
  // The staging limits a chunk: 2 slots, 4 rotations.
  plan::Shape shape = shape_of(moecclOpTensorAllToAll, 8, 1024);
  shape.staging_bytes = 8 * 16 * kElement;
  shape.pipeline_chunks.o3 = 4;
  EXPECT_EQ(plan_of(moecclOpTensorAllToAll, "o3", shape, tree).chunking.chunk, 16u);
}

// The paper's order: on links as slow as 1:8, pipelining beats the sequence, and both beat t copies.
TEST(TensorExchange, PricesAreInTheOrderOfThePaper) {
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {0, 0.1}, {8, 8}}}, "gpu", {0, 0.1});
  plan::Profile profile;
  profile.cores = 16;
  double ns[5];
  for (int i = 0; i < 5; ++i) ns[i] = plan::price(plan_for(kVariants[i], 16384, tree), tree, profile).total_ns;
  EXPECT_LT(ns[1], 0.4 * ns[0]);
  EXPECT_LT(ns[2], ns[1]);
  EXPECT_LE(ns[3], ns[2]);
  EXPECT_LT(ns[4], ns[3]);
}

}  // namespace
}  // namespace moeccl::algo::testing
