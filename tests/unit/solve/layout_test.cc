// SPDX-License-Identifier: Apache-2.0
#include "src/solve/layout.h"

#include <gtest/gtest.h>

#include <string>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

moecclLayoutProblem_t mixtral() {
  moecclLayoutProblem_t p = MOECCL_LAYOUT_PROBLEM_INIT;
  p.n_gpus = 64;
  p.gpus_per_node = 8;
  p.gpu_bytes = 80e9;
  p.intra_bandwidth = 200e9;
  p.inter_bandwidth = 25e9;
  p.n_layers = 32;
  p.n_heads = 32;
  p.n_experts = 8;
  p.top_k = 2;
  p.hidden = 4096;
  p.sequence = 8192;
  p.global_batch = 256;
  p.dense_parameters = 1.6e9;
  p.moe_parameters = 45e9;
  p.zero_stage = 1;
  p.sequence_parallel = 1;
  p.recompute = moecclRecomputeSelective;
  return p;
}

std::vector<moecclLayout_t> solve(const moecclLayoutProblem_t& p) {
  int32_t n = -1;
  EXPECT_EQ(moecclSolveLayout(&p, nullptr, 0, &n), moecclSuccess) << moecclGetLastError(nullptr);
  std::vector<moecclLayout_t> all(static_cast<size_t>(n));
  EXPECT_EQ(moecclSolveLayout(&p, all.data(), n, &n), moecclSuccess);
  return all;
}

TEST(Layout, EveryLayoutUsesAllGpusFitsAndIsRanked) {
  const moecclLayoutProblem_t p = mixtral();
  const auto all = solve(p);
  ASSERT_FALSE(all.empty());
  double last = 0;
  for (const moecclLayout_t& v : all) {
    const int32_t ranks =
        v.vertical ? v.tensor * v.context * v.pipeline * v.data : v.tensor * v.expert * v.context * v.pipeline * v.data;
    EXPECT_EQ(ranks, 64);
    EXPECT_EQ(v.vertical, v.context >= v.expert ? 1 : 0) << "MoNTA: vertical when cp >= ep";
    EXPECT_LE(v.weight_bytes + v.activation_bytes, p.gpu_bytes);
    EXPECT_GE(v.comm_us, last);
    EXPECT_NEAR(v.comm_us, v.tp_us + v.ep_us + v.cp_us + v.pp_us + v.dp_us, 1e-6 * v.comm_us);
    last = v.comm_us;
  }
}

// Tables 3 and 4 and Eq. 2 by hand.
TEST(Layout, MemoryIsTheTables) {
  moecclLayoutProblem_t p = mixtral();
  moecclLayout_t v{};
  v.tensor = 2, v.expert = 4, v.context = 1, v.pipeline = 2, v.data = 4;
  p.recompute = moecclRecomputeNone;
  const double bshl = 8192.0 * 4096 * 32, scores = 5.0 * 32 * 8192 / 4096;
  const double factor[] = {16, 4 + 12.0 / 16, 2 + 14.0 / 16, 16.0 / 16},
               expert_factor[] = {16, 4 + 12.0 / 4, 2 + 14.0 / 4, 4};
  for (int stage = 0; stage <= 3; ++stage) {
    p.zero_stage = stage;
    price_layout(p, v);
    EXPECT_NEAR(v.weight_bytes, 1.6e9 / 4 * factor[stage] + 45e9 / 16 * expert_factor[stage], 1) << "stage " << stage;
  }
  EXPECT_NEAR(v.activation_bytes, bshl * ((13 + 42) / 2.0 + scores / 2), 1);
  p.sequence_parallel = 0;
  price_layout(p, v);
  EXPECT_NEAR(v.activation_bytes, bshl * (5 + 10 + (8 + 32) / 2.0 + scores / 2), 1);
  v.tensor = 1;
  price_layout(p, v);
  EXPECT_NEAR(v.activation_bytes, bshl * (13 + 42 + scores), 1);  // Eq. 2
  p.sequence_parallel = 1;
  p.recompute = moecclRecomputeSelective;
  price_layout(p, v);
  EXPECT_NEAR(v.activation_bytes, bshl * 55, 1);
  p.recompute = moecclRecomputeFull;
  price_layout(p, v);
  EXPECT_NEAR(v.activation_bytes, bshl * 2, 1);
}

TEST(Layout, LongerContextsNeedContextParallelismAndTooSmallGpusHaveNone) {
  moecclLayoutProblem_t p = mixtral();
  p.sequence = 1 << 20;
  p.recompute = moecclRecomputeFull;
  const auto all = solve(p);
  ASSERT_FALSE(all.empty());
  for (const moecclLayout_t& v : all) EXPECT_GT(v.context * v.tensor, 1);
  p.gpu_bytes = 1e9;
  EXPECT_TRUE(solve(p).empty());
}

TEST(Layout, NamesBadArguments) {
  int32_t n = 0;
  const auto says = [&](const moecclLayoutProblem_t& p, const char* word) {
    EXPECT_EQ(moecclSolveLayout(&p, nullptr, 0, &n), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
  };
  moecclLayoutProblem_t p = mixtral();
  p.top_k = 9;
  says(p, "top_k");
  p = mixtral();
  p.gpu_bytes = 0;
  says(p, "gpu_bytes");
  p = mixtral();
  p.sequence_parallel = 0;
  says(p, "recompute");
}

}  // namespace
}  // namespace moeccl::solve
