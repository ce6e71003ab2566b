// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/oracle.h"

#include <gtest/gtest.h>

#include <cstring>

namespace perf {
namespace {

// Two ranks with two experts each; capacity 1.
struct Small {
  MoeOptions options;
  std::vector<RankRouting> routing;
  std::vector<int32_t> expert_rank = {0, 0, 1, 1};

  explicit Small(moecclMoeLayout_t layout) {
    options.hidden = 8;
    options.top_k = 2;
    options.n_experts = 4;
    options.layout = layout;
    options.align_rows = layout == moecclLayoutRows ? 1 : 2;
    options.type = moecclBfloat16;
    options.capacity = 1;
    routing = {{2, {0, 2, 0, 1}, {1, 0.5f, 1, 0.5f}}, {1, {1, -1}, {0.5f, 1}}};
  }
};

TEST(MoeOracle, CountsRowsOfTheExpertLayoutWithPaddingAndDrops) {
  const Small small(moecclLayoutExpertMajor);
  // Rank 0: expert 0 has token 0 of rank 0 (token 1 is dropped) and padding; expert 1 has one token of each rank.
  EXPECT_EQ(Oracle(small.options, small.routing, small.expert_rank, 0).n_rows(), 4u);
  EXPECT_EQ(Oracle(small.options, small.routing, small.expert_rank, 1).n_rows(), 2u);
}

TEST(MoeOracle, CountsEachTokenOnceInTheRowsLayout) {
  const Small small(moecclLayoutRows);
  EXPECT_EQ(Oracle(small.options, small.routing, small.expert_rank, 0).n_rows(), 3u);
  EXPECT_EQ(Oracle(small.options, small.routing, small.expert_rank, 1).n_rows(), 1u);
}

TEST(MoeOracle, SeesARowOfTheWrongToken) {
  const Small small(moecclLayoutRows);
  const Oracle source(small.options, small.routing, small.expert_rank, 0);
  std::vector<char> tokens(2 * source.row_bytes());
  source.fill_tokens(tokens.data());
  // Rank 1 receives token 0 of rank 0.
  const Oracle receiver(small.options, small.routing, small.expert_rank, 1);
  EXPECT_EQ(receiver.check_rows(tokens.data()), 0u);
  EXPECT_EQ(receiver.check_rows(tokens.data() + source.row_bytes()), 1u);
  tokens[15] ^= 1;
  EXPECT_EQ(receiver.check_rows(tokens.data()), 1u);
}

// One rank owns everything, so that the test can do the combine itself.
TEST(MoeOracle, ExpectsTheWeightedSumOfTheExperts) {
  Small small(moecclLayoutRows);
  small.expert_rank = {0, 0, 0, 0};
  small.options.capacity = 0;
  small.routing.resize(1);
  const Oracle oracle(small.options, small.routing, small.expert_rank, 0);
  ASSERT_EQ(oracle.n_rows(), 2u);
  std::vector<char> rows(2 * oracle.row_bytes());
  oracle.fill_outputs(rows.data());  // already weighted and summed, so with one rank it is the result
  EXPECT_EQ(oracle.check_tokens(rows.data(), true), 0u);
  rows[0] ^= 1;
  EXPECT_EQ(oracle.check_tokens(rows.data(), true), 1u);
}

TEST(MoeOracle, WeighsOnlyWhereTheTypeHasTheBits) {
  EXPECT_TRUE(has_half_weights(data_type(moecclBfloat16), 8));
  EXPECT_TRUE(has_half_weights(data_type(moecclFloat8e4m3), 8));
  EXPECT_FALSE(has_half_weights(data_type(moecclFloat8e5m2), 8));
}

// With more experts than the type counts exactly, all values would be zero, and any combined token would be right.
TEST(MoeOracle, KnowsWhichSumsATypeCanCheck) {
  for (const auto type : {moecclFloat8e5m2, moecclFloat8e4m3}) {
    const int most = static_cast<int>(data_type(type).exact);
    EXPECT_TRUE(is_exact(data_type(type), most));
    EXPECT_FALSE(is_exact(data_type(type), most + 1));
  }
  EXPECT_TRUE(is_exact(data_type(moecclBfloat16), 64));
}

}  // namespace
}  // namespace perf
