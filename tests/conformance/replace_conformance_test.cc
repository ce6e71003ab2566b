// SPDX-License-Identifier: Apache-2.0
// The re-placing combine through the C interface, compared with sums that are formed one by one: every algorithm and
// layout, with and without residual, uneven nodes, ranks without tokens or experts, odd rows; its backward pass; and
// calls that must be refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>
#include <tuple>

#include "moeccl/moeccl.h"
#include "tests/conformance/replace_step.h"
#include "tests/conformance/two_experts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

using Shape = ReplaceShape;
using Truth = ReplaceTruth;
using Case = ReplaceCase;
using Step = ReplaceStep;

const Shape kShapes[] = {
    {"OneRank", 1, RankMode::kThreads, "", 2, 4, 7, 3, {4}},
    {"TwoNodesOfTwo", 4, RankMode::kProcesses, "node:2 gpu:2", 3, 8, 16, 5, {4, 4, 4, 4}},
    {"TwoNodesInTurn", 4, RankMode::kProcesses, "node:2 gpu:2", 3, 8, 16, 5, {4, 4, 4, 4}, {}, true},
    {"TwoHostsOfOne", 2, RankMode::kProcesses, "node:2 gpu:1", 2, 6, 8, 3, {3, 2}},
    {"Uneven3And4", 7, RankMode::kMixed, "node:2 gpu:3+4", 2, 10, 9, 2, {3, 0, 5, 1, 4, 0, 6}},
    {"ExpertsOnTwoRanks", 5, RankMode::kThreads, "node:2 gpu:2+3", 2, 6, 33, 4, {2, 3, 0, 4, 1}, {1, 4, 1, 4, 4, 1}},
    {"NoTokensAtAll", 3, RankMode::kThreads, "", 2, 6, 8, 4, {0, 0, 0}},
    {"SixteenRanks", 16, RankMode::kThreads, "node:4 gpu:4", 4, 32, 8, 2, std::vector<size_t>(16, 3)},
};

void run_case(const Shape& shape, const Case& c, int rank, moecclComm_t comm) {
  const moecclMoeConfig_t config = layer_of(shape, c);
  const char* topology = shape.topology[0] == 0 ? nullptr : shape.topology;
  char why[300];
  if (moecclMoeCheck(&config, shape.n, topology, why, sizeof(why)) != moecclSuccess) return;  // too few levels
  moecclMoe_t moe = nullptr;
  moecclReplacement_t replacement = nullptr;
  moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
  replace.sample_tokens = shape.sample;
  replace.mode = c.mode;
  replace.residual = c.residual;
  replace.use_next = c.next;
  replace.min_gain = -1;
  MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
  MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
  for (uint64_t step = 0; step < 2 && !::testing::Test::HasFatalFailure(); ++step) {
    const Truth truth(shape, step);
    Step(truth, c, rank, comm).run(moe, replacement);
  }
  EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess) << moecclGetLastError(nullptr);
  EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
}

class ReplaceConformance : public ::testing::TestWithParam<Shape> {};

TEST_P(ReplaceConformance, EverySampleArrivesAtItsNewHome) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode, .deadline_ms = 120'000};
  options.config.topology = shape.topology[0] == 0 ? nullptr : shape.topology;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        for (const moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
          int turn = layout == moecclLayoutRows ? 0 : 1;
          for (const char* algorithm : {"flat", "2dh", "hier:1", "hier:2", "auto"}) {
            for (const int residual : {0, 1, 2}) {
              if (shape.in_turn && turn++ % 2 == 1) continue;
              const moecclReplaceMode_t mode = residual == 1 ? moecclReplaceSolve : moecclReplaceGiven;
              SCOPED_TRACE(std::string(layout == moecclLayoutRows ? "rows, " : "expert-major, ") + algorithm);
              // A reversed placement keeps the counts only where all ranks have equally many samples.
              const bool even = std::adjacent_find(shape.samples.begin(), shape.samples.end(), std::not_equal_to<>()) ==
                                shape.samples.end();
              run_case(
                  shape,
                  {layout, algorithm, residual, even ? mode : moecclReplaceSolve, residual == 1 ? (even ? 1 : 0) : 2},
                  rank, comm);
              if (::testing::Test::HasFatalFailure()) return;
            }
          }
        }
        run_case(shape, {moecclLayoutExpertMajor, "flat", 1, moecclReplaceKeep, 0}, rank, comm);
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReplaceConformance, ::testing::ValuesIn(kShapes),
                         [](const ::testing::TestParamInfo<Shape>& info) { return info.param.name; });

// Where all links are equally fast, the gain of a uniform routing is small: samples stay, after a few steps Begin
// exchanges nothing, and every kind of residual still arrives.
TEST(ReplaceGain, WhatDoesNotPayIsSkippedAndComesOutTheSame) {
  const Shape shape{"Skips", 4, RankMode::kThreads, "node:2 gpu:2", 2, 8, 8, 3, {4, 4, 4, 4}};
  RankOptions options{.mode = shape.mode, .deadline_ms = 120'000};
  options.config.topology = shape.topology;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        for (const int residual : {0, 1, 2}) {
          for (const moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
            const Case c{layout, "hier:2", residual, moecclReplaceSolve, 0};
            const moecclMoeConfig_t config = layer_of(shape, c);
            moecclMoe_t moe = nullptr;
            moecclReplacement_t replacement = nullptr;
            moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
            replace.sample_tokens = shape.sample;
            replace.residual = residual;
            replace.min_gain = 0.99;
            MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
            MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
            int skipped = 0;
            for (uint64_t step = 0; step < 12 && !::testing::Test::HasFatalFailure(); ++step) {
              const Truth truth(shape, step);
              Step one(truth, c, rank, comm);
              one.run(moe, replacement);
              EXPECT_EQ(one.facts.keep, 1);
              EXPECT_EQ(one.facts.moved, 0);
              skipped += one.facts.skipped;
            }
            EXPECT_GE(skipped, 8) << "of 12 steps";
            EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
            EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
          }
        }
      },
      options);
}

// In a skipped step, a wrong argument is one rank's own affair: it calls again and is where the others are.
TEST(ReplaceGain, AWrongCallInASkippedStepIsRepeated) {
  const Shape shape{"Repeats", 2, RankMode::kThreads, "", 2, 4, 8, 3, {4, 4}};
  run_ranks(shape.n, [&](int rank, moecclComm_t comm) {
    const Case c{moecclLayoutRows, "flat", 0, moecclReplaceSolve, 2};
    const moecclMoeConfig_t config = layer_of(shape, c);
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = shape.sample;
    replace.use_next = c.next;
    replace.min_gain = 0.99;
    moecclMoe_t moe = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclRouting_t routing = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    const std::vector<int32_t> none(config.max_tokens * static_cast<size_t>(shape.top_k), -1);
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, none.data(), nullptr, config.max_tokens), comm);
    int skipped = 0;
    for (uint64_t step = 0; step < 16 && !::testing::Test::HasFatalFailure(); ++step) {
      // Step 0 asks, and the next four are skipped.
      if (rank == 1 && step == 2) {
        EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, nullptr), moecclInvalidArgument);
      }
      const Truth truth(shape, step);
      Step one(truth, c, rank, comm);
      one.run(moe, replacement);
      skipped += one.facts.skipped;
    }
    EXPECT_EQ(skipped, 13) << "of 16 steps: 4, 8 and the first of 16";
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// Rank 1 comes late to the combine of a skipped step, which is then still on rank 0's stream when the next step begins
// with another routing.
TEST(ReplaceGain, ASkippedStepWaitsForTheListsOfTheLast) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    constexpr size_t kTokens = 64, kWidth = 8;
    const moecclMoeConfig_t config = two_experts(kTokens, kWidth, moecclLayoutRows);
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = 4;
    replace.residual = 2;
    replace.min_gain = 0.99;
    moecclMoe_t moe = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    MOECCL_ASSERT_COMM_OK(moecclStreamCreate(&stream), comm);
    std::vector<int32_t> both(kTokens), one(4, 0);
    for (size_t i = 0; i < both.size(); ++i) both[i] = static_cast<int32_t>(i % 2);
    moecclRouting_t first = nullptr, second = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&first, moe, both.data(), nullptr, both.size()), comm);
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&second, moe, one.data(), nullptr, one.size()), comm);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(first, &info), comm);
    std::vector<float> x(kTokens * kWidth), rows((info.n_rows + 1) * kWidth), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(1000 * rank) + static_cast<float>(i);
    // The experts return what they get, so a token comes back twice: from its expert and as its residual.
    const auto fill = [&](std::vector<float>& in) {
      MOECCL_ASSERT_COMM_OK(moecclDispatch(first, x.data(), rows.data(), nullptr), comm);
      size_t n_rows = 0;
      MOECCL_ASSERT_COMM_OK(moecclReplaceRows(replacement, &n_rows), comm);
      in.assign((n_rows + 1) * kWidth, -7);
      std::copy_n(rows.begin(), info.n_rows * kWidth, in.begin());
      MOECCL_ASSERT_COMM_OK(moecclReplaceResidual(replacement, x.data(), nullptr, in.data()), comm);
    };
    std::vector<float> in;
    moecclReplaceInfo_t facts{};
    facts.size = sizeof(facts);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, first, nullptr, nullptr), comm);
    fill(in);
    MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, in.data(), out.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, first, nullptr, nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceGetInfo(replacement, &facts), comm);
    ASSERT_EQ(facts.skipped, 1);
    fill(in);
    std::fill(out.begin(), out.end(), -1.0f);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, in.data(), out.data(), stream), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, second, nullptr, nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceGetInfo(replacement, &facts), comm);
    EXPECT_EQ(facts.skipped, 1);
    MOECCL_ASSERT_COMM_OK(moecclStreamSynchronize(stream), comm);
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], 2 * x[i]) << "element " << i;
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(first), comm);
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(second), comm);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
    EXPECT_EQ(moecclStreamDestroy(stream), moecclSuccess);
  });
}

TEST(ReplaceUsage, WhatCannotWorkIsRefusedOnAllRanks) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const moecclMoeConfig_t config = two_experts(8, 4, moecclLayoutRows);
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    replace.sample_tokens = 4;
    replace.mode = moecclReplaceGiven;
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    size_t rows = 0;
    EXPECT_EQ(moecclReplaceRows(replacement, &rows), moecclInvalidUsage);
    const int32_t index[8] = {0, 1, 0, 1, 0, 1, 0, 1};
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index, nullptr, rank == 0 ? 8 : 6), comm);
    const int32_t homes[3] = {0, 0, 1}, other[3] = {0, 1, 0}, many[3] = {1, 1, 1};
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, homes), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 1 has 6 tokens"), std::string::npos);
    MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, index, nullptr, rank == 0 ? 8 : 4), comm);
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, many), moecclInvalidArgument);
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, rank == 0 ? homes : other), moecclMismatch);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, homes), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceRows(replacement, &rows), comm);
    EXPECT_EQ(moecclReplaceResidual(replacement, nullptr, nullptr, nullptr), moecclInvalidUsage);
    MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, index, nullptr, 4), comm);
    EXPECT_EQ(moecclReplaceRows(replacement, &rows), moecclInvalidUsage);
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
    EXPECT_EQ(moecclReplaceRows(replacement, &rows), moecclInvalidUsage);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclInvalidArgument);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// What only the solver refused would end the communicator on all ranks, in the middle of a step.
TEST(ReplaceUsage, WhatTheSolverCannotTakeIsRefusedBeforeIt) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = two_experts(8, 4, moecclLayoutRows);
    config.layout = moecclLayoutExpertMajor;
    config.algorithm = "flat";
    moecclMoe_t moe = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    const auto says = [&](const char* text) {
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(text), std::string::npos) << moecclGetLastError(comm);
    };
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = 4;
    moecclReplacement_t replacement = nullptr;
    replace.min_gain = -INFINITY;
    EXPECT_EQ(moecclReplaceCreate(&replacement, moe, &replace), moecclInvalidArgument);
    says("config.min_gain is -inf");
    replace.min_gain = -1;
    replace.use_next = 1;
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    const int32_t index[4] = {0, 1, 0, 1};
    moecclRouting_t routing = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index, nullptr, 4), comm);
    constexpr int32_t kMost = (1 << 30) - 1;  // rows of a sample, in both operations together
    const int32_t good[2] = {kMost - 4, 0}, bad[2] = {kMost - 4, 1};
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, rank == 0 ? good : bad, nullptr),
              rank == 0 ? moecclRemoteError : moecclInvalidArgument);
    says(rank == 0 ? "rank 1" : "next of sample 0 of this rank counts 1073741820 rows: at most 1073741819");
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, good, nullptr), comm);
    moecclReplaceInfo_t facts{};
    facts.size = sizeof(facts);
    MOECCL_ASSERT_COMM_OK(moecclReplaceGetInfo(replacement, &facts), comm);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    replace.use_next = 2;
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, nullptr), moecclInvalidArgument);
    says("config.use_next is 2: give next_index[4][1]");
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// Counts of 128 samples for 4096 experts, in this layer and the next, are larger than all tables.
TEST(ReplaceUsage, TheCapCoversTheSolversCounts) {
  constexpr int kTokens = 64, kExperts = 4096;
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = two_experts(kTokens, 4, moecclLayoutExpertMajor);
    config.n_experts = kExperts;
    config.layout = moecclLayoutExpertMajor;
    config.algorithm = "flat";
    std::vector<int32_t> index(kTokens, rank), next(kTokens * kExperts);
    for (const auto& [cap, use_next, expected] : {std::tuple{size_t{3} << 20, 0, moecclSuccess},
                                                  {size_t{5} << 20, 1, moecclOutOfMemory},
                                                  {size_t{9} << 20, 1, moecclSuccess}}) {
      config.memory_cap_bytes = cap;
      moecclMoe_t moe = nullptr;
      moecclRouting_t routing = nullptr;
      moecclReplacement_t replacement = nullptr;
      moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
      replace.use_next = use_next;
      MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
      MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
      MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, kTokens), comm);
      ASSERT_EQ(moecclReplaceBegin(replacement, routing, use_next ? next.data() : nullptr, nullptr), expected)
          << cap << ", " << use_next << ": " << moecclGetLastError(comm);
      MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
      EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
      EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
    }
  });
}

// The rank that gives wrong choices keeps the number of tokens of the update before, and the other one has the new one.
TEST(ReplaceUsage, AfterAFailedUpdateAllRanksRefuseAlike) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const moecclMoeConfig_t config = two_experts(64, 4, moecclLayoutRows);
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.min_gain = -1;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, moe, &replace), comm);
    const std::vector<int32_t> right(64, rank), wrong(64, 7);
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, right.data(), nullptr, 4), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, nullptr), comm);
    EXPECT_NE(moecclRoutingUpdate(routing, rank == 0 ? right.data() : wrong.data(), nullptr, 64), moecclSuccess);
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, nullptr), moecclInvalidUsage);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("the routing is empty"), std::string::npos)
        << moecclGetLastError(comm);
    MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, right.data(), nullptr, 64), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, nullptr), comm);
    size_t rows = 0;
    MOECCL_ASSERT_COMM_OK(moecclReplaceRows(replacement, &rows), comm);
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// The routing runs a plan that the replacement's layer, which is forced to one, does not have.
TEST(ReplaceUsage, ARoutingOfAnotherLayerIsRefused) {
  RankOptions options;
  options.config.topology = "node:2(bw=0.01GB/s,lat=5us) gpu:2(bw=100GB/s,lat=1us)";
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        constexpr size_t kTokens = 16;
        constexpr int32_t kTopK = 8;
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = 4096;
        config.type = moecclFloat32;
        config.top_k = kTopK;
        config.n_experts = 16;
        config.max_tokens = kTokens;
        moecclMoe_t any = nullptr, flat = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&any, comm, &config), comm);
        config.algorithm = "flat";
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&flat, comm, &config), comm);
        moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
        replace.use_next = 2;
        moecclReplacement_t replacement = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclReplaceCreate(&replacement, flat, &replace), comm);
        std::vector<int32_t> index(kTokens * kTopK);
        for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int32_t>(2 * i % 16);
        moecclRouting_t routing = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, any, index.data(), nullptr, kTokens), comm);
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
        ASSERT_STRNE(info.algorithm, "flat");
        EXPECT_EQ(moecclReplaceBegin(replacement, routing, index.data(), nullptr), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("another layer"), std::string::npos);
        MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
        // The other layer's communicator may even have been destroyed, and another one have its memory. Only of an
        // empty routing is the communicator asked.
        moecclComm_t gone = nullptr, aborted = nullptr;
        moecclMoe_t on_gone = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, 0, &gone, nullptr), comm);
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&on_gone, gone, &config), comm);
        MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, on_gone, index.data(), nullptr, kTokens), comm);
        EXPECT_EQ(moecclRoutingUpdate(routing, index.data(), nullptr, kTokens + 1), moecclInvalidArgument);
        EXPECT_EQ(moecclCommDestroy(gone), moecclSuccess);
        MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, 0, &aborted, nullptr), comm);
        EXPECT_EQ(moecclCommAbort(aborted), moecclSuccess);
        EXPECT_EQ(moecclReplaceBegin(replacement, routing, index.data(), nullptr), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("another layer"), std::string::npos);
        EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(on_gone), moecclSuccess);
        EXPECT_EQ(moecclCommDestroy(aborted), moecclSuccess);
        EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(flat), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(any), moecclSuccess);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
