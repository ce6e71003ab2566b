// SPDX-License-Identifier: Apache-2.0
#include "src/solve/layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "src/base/format.h"
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

moecclLayoutCost_t priced(const moecclLayoutProblem_t& p, const moecclLayout_t& v) {
  moecclLayoutCost_t cost{};
  cost.size = sizeof(cost);
  EXPECT_EQ(moecclPriceLayout(&p, &v, &cost), moecclSuccess) << moecclGetLastError(nullptr);
  return cost;
}

TEST(Layout, EveryLayoutUsesAllGpusFitsAndIsRanked) {
  const moecclLayoutProblem_t p = mixtral();
  const auto all = solve(p);
  ASSERT_FALSE(all.empty());
  double last = 0;
  bool idle = false;
  for (const moecclLayout_t& v : all) {
    const int32_t ranks =
        v.vertical ? v.tensor * v.context * v.pipeline * v.data : v.tensor * v.expert * v.context * v.pipeline * v.data;
    EXPECT_EQ(ranks, 64);
    EXPECT_EQ(v.vertical, v.context >= v.expert ? 1 : 0) << "MoNTA: vertical when cp >= ep";
    EXPECT_LE(v.weight_bytes + v.activation_bytes, p.gpu_bytes);
    const moecclLayoutCost_t cost = priced(p, v);
    EXPECT_GE(cost.bubble > 0.3, idle) << "long bubbles come last";
    if (idle != (cost.bubble > 0.3)) last = 0;
    idle = cost.bubble > 0.3;
    EXPECT_GE(cost.step_us, last);
    EXPECT_NEAR(v.comm_us, v.tp_us + v.ep_us + v.cp_us + v.pp_us + v.dp_us, 1e-6 * v.comm_us);
    last = cost.step_us;
  }
}

// 512 GPUs, 32K context, 64 sequences: 16 stages with two micro batches communicate least, but idle for 88 % of the
// step.
TEST(Layout, NoIdlePipelineLeadsWhereABusyOneFits) {
  SplitMix64 random(testing::seed() + 61);
  for (int round = 0; round < 60; ++round) {
    moecclLayoutProblem_t p = mixtral();
    p.gpu_flops = random.below(2) ? 312e12 : 0;
    p.n_gpus = round == 0 ? 512 : 64 << random.below(4);
    p.sequence = round == 0 ? 32768 : 8192 << random.below(4);
    p.global_batch = round == 0 ? 64 : 16 << random.below(6);
    const auto all = solve(p);
    const bool busy = std::any_of(all.begin(), all.end(), [&](const auto& v) { return priced(p, v).bubble < 0.1; });
    for (size_t i = 0; busy && i < std::min<size_t>(5, all.size()); ++i)
      ASSERT_LE(priced(p, all[i]).bubble, 0.3) << "layout " << i << " of round " << round;
    if (round == 0) {
      EXPECT_TRUE(busy);
    }
  }
}

// Computed by hand: 1.6e9 + 45e9 / 4 parameters per token, scores of half the sequence, three passes.
TEST(Layout, AStepIsComputeCommunicationAndTheBubble) {
  moecclLayoutProblem_t p = mixtral();
  p.gpu_flops = 312e12, p.compute_efficiency = 0.5;
  moecclLayout_t v{};
  v.tensor = 2, v.expert = 4, v.context = 1, v.pipeline = 4, v.data = 2;
  price_layout(p, v);
  const moecclLayoutCost_t cost = priced(p, v);
  EXPECT_EQ(cost.micro_batches, 32);  // 256 sequences on 8 replicas
  EXPECT_DOUBLE_EQ(cost.bubble, 3.0 / 35);
  EXPECT_EQ(cost.switch_ranks, 4);
  const double token = 2 * (1.6e9 + 45e9 / 4) + 2.0 * 32 * 4096 * 8192;
  EXPECT_NEAR(cost.compute_us, 1e6 * 3 * 32 * 8192 * token / 8 / 156e12, 1);
  EXPECT_NEAR(cost.step_us, (cost.compute_us + v.tp_us + v.ep_us + v.cp_us) * 35 / 32 + v.pp_us + v.dp_us, 1);
  EXPECT_NEAR(cost.mfu, 3 * 256 * 8192.0 * token / (1e-6 * cost.step_us * 312e12 * 64), 1e-9);
  EXPECT_LT(cost.mfu, 0.5);
  // Eq. 11 with 2 x 4 ranks inside one node: half goes to each expert's ranks, then comes the AllGather of the halves.
  const double block = 8192.0 * 4096 * 2;
  EXPECT_NEAR(v.ep_us, 1e6 * 32 * 8 * 4 * block * 2 * (0.75 / 2 + 0.5) / 200e9, 1);
}

// The ranks that hold the same weights are a whole pipeline apart.
TEST(Layout, GradientsAndStagesAreOnTheLinksThatTheyCross) {
  moecclLayoutProblem_t p = mixtral();
  p.gpu_bytes = 1e15;
  const auto all_reduce = [](double bytes, double n, double bandwidth) {
    return 2e6 * bytes * (n - 1) / n / bandwidth;
  };
  int checked = 0;
  for (const moecclLayout_t& v : solve(p)) {
    if (v.tensor != 1 || v.context != 1) continue;
    const double dense = 2 * p.dense_parameters / v.pipeline, experts = 2 * p.moe_parameters / v.pipeline / v.expert;
    const double replicas = v.expert * v.data;
    const bool inside = v.data == 1 && v.expert <= 8;
    const double link = inside ? p.intra_bandwidth : p.inter_bandwidth;
    EXPECT_NEAR(v.dp_us, all_reduce(dense, replicas, link) + all_reduce(experts, v.data, link), 1e-9 * v.dp_us)
        << "e" << v.expert << " p" << v.pipeline << " d" << v.data;
    ++checked;
  }
  EXPECT_GT(checked, 5);
  p.n_gpus = 8;
  for (const moecclLayout_t& v : solve(p)) {
    if (v.pipeline == 1) continue;
    moecclLayoutProblem_t slower = p;
    slower.inter_bandwidth = 1e9;
    for (const moecclLayout_t& w : solve(slower))
      if (w.tensor == v.tensor && w.expert == v.expert && w.context == v.context && w.pipeline == v.pipeline) {
        EXPECT_EQ(w.pp_us, v.pp_us) << "all stages are on one node";
      }
  }
}

TEST(Layout, TheSwitchCarriesExpertTimesContextRanks) {
  moecclLayoutProblem_t p = mixtral();
  p.sequence = 65536;
  const auto horizontal = [&](const std::vector<moecclLayout_t>& all) {
    return std::count_if(all.begin(), all.end(), [](const auto& v) {
      return !v.vertical && v.context > 1 && v.tensor * v.expert * v.context > 8 && v.expert * v.context > 8;
    });
  };
  EXPECT_GT(horizontal(solve(p)), 0);
  p.switch_ranks = 8;
  const auto all = solve(p);
  EXPECT_EQ(horizontal(all), 0);
  EXPECT_TRUE(std::any_of(all.begin(), all.end(), [](const auto& v) { return v.vertical && v.context == 8; }));
}

// Computes Tables 3 and 4 and Eq. 2 by hand.
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
  p = mixtral();
  p.compute_efficiency = 2;
  says(p, "compute_efficiency");
  moecclLayout_t none{};
  moecclLayoutCost_t cost{};
  cost.size = sizeof(cost);
  p = mixtral();
  EXPECT_EQ(moecclPriceLayout(&p, &none, &cost), moecclInvalidArgument);
  moecclLayout_t vast{};
  vast.tensor = vast.data = vast.pipeline = 1;
  vast.expert = vast.context = 1 << 20;
  EXPECT_EQ(moecclPriceLayout(&p, &vast, &cost), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("layout has 1099511627776 ranks"), std::string::npos)
      << moecclGetLastError(nullptr);
  moecclLayout_t half = solve(p).front();
  p.n_gpus *= 2;
  EXPECT_EQ(moecclPriceLayout(&p, &half, &cost), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(format("problem.n_gpus is {}", p.n_gpus)), std::string::npos)
      << moecclGetLastError(nullptr);
}

}  // namespace
}  // namespace moeccl::solve
