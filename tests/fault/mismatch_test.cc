// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree get moecclMismatch within 2 s, with a sentence that names both and the field. No rank hangs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "tests/fault/mismatch_calls.h"

namespace moeccl::testing {
namespace {

// Every rank returns in time. A rank that waits for no other rank in this operation, such as a broadcast's root, cannot
// know of the mismatch and may succeed; the next operation at the latest tells it.
void expect_mismatch(const Call& usual, const Call& odd, const char* field, RankMode mode) {
  Shared<std::atomic<int>> told_at_once;
  Meeting agreed;
  const RankOptions options{.mode = mode, .deadline_ms = 30'000};
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        Buffers b(usual.count);
        MOECCL_ASSERT_COMM_OK(perform(usual, comm, b), comm);  // they agree first
        ASSERT_TRUE(agreed.meet(kRanks));                      // all have finished it, see agreement_test.cc
        const Stopwatch watch;
        moecclResult_t result = perform(rank == kOdd ? odd : usual, comm, b);
        if (result != moecclSuccess) told_at_once->fetch_add(1);
        while (result == moecclSuccess && watch.fair_ms() < patient_ms(2 * kLimitMs)) result = perform(usual, comm, b);
        MOECCL_EXPECT_WITHIN(watch, kLimitMs);
        const std::string text = moecclGetLastError(comm);
        EXPECT_EQ(result, moecclMismatch) << moecclGetErrorString(result) << ": " << text;
        expect_named(text, field, moecclOpName(usual.op));
        EXPECT_EQ(perform(usual, comm, b), moecclMismatch) << "the communicator stays in its error";
      },
      options);
  EXPECT_GE(told_at_once->load(), 1);
}

class Mismatch : public ::testing::TestWithParam<std::tuple<Collective, RankMode>> {
 protected:
  Collective op() const { return std::get<0>(GetParam()); }
  RankMode mode() const { return std::get<1>(GetParam()); }
  Call usual() const { return {.op = op().op}; }
};

TEST_P(Mismatch, OfCountNamesBothRanksAndCounts) {
  Call odd = usual();
  odd.count = 4100;
  expect_mismatch(usual(), odd, "4100", mode());
}

// In a large count, one header byte more or less would not be noticed.
TEST_P(Mismatch, OfCountIsSeenAtSmallSizesToo) {
  Call few = usual(), odd = usual();
  few.count = 2;
  odd.count = 3;
  expect_mismatch(few, odd, "count", mode());
}

TEST_P(Mismatch, OfTypeNamesTheTypes) {
  Call odd = usual();
  odd.type = moecclInt32;  // has the same size
  expect_mismatch(usual(), odd, "int32", mode());
}

TEST_P(Mismatch, OfOperatorNamesTheOperators) {
  if (!op().reduces) GTEST_SKIP() << "no operator";
  Call odd = usual();
  odd.reduce = moecclMax;
  expect_mismatch(usual(), odd, "max", mode());
}

TEST_P(Mismatch, OfRootNamesTheRoots) {
  if (!op().rooted) GTEST_SKIP() << "no root";
  Call odd = usual();
  odd.root = 3;
  expect_mismatch(usual(), odd, "root", mode());
}

// One rank calls two collectives in the opposite order.
TEST_P(Mismatch, OfOrderNamesTheOperations) {
  Call odd = usual();
  odd.op = op().op == moecclOpAllGather ? moecclOpAllToAll : moecclOpAllGather;
  expect_mismatch(usual(), odd, odd.op == moecclOpAllGather ? "allgather" : "alltoall", mode());
}

INSTANTIATE_TEST_SUITE_P(Collectives, Mismatch,
                         ::testing::Combine(::testing::ValuesIn(kCollectives, kCollectives + kPlainCollectives),
                                            ::testing::Values(RankMode::kThreads, RankMode::kProcesses)),
                         [](const ::testing::TestParamInfo<std::tuple<Collective, RankMode>>& info) {
                           return std::string(std::get<0>(info.param).name) + "_" + mode_name(std::get<1>(info.param));
                         });

class MismatchOfMode : public ::testing::TestWithParam<RankMode> {};

TEST_P(MismatchOfMode, ForcedPlans) {
  // The same names work for several operations, and AllReduce has the most.
  const Call usual{.plan = "ring"}, odd{.plan = "tree"};
  expect_mismatch(usual, odd, "plan", GetParam());
}

// The sentence is "rank 2 sends 4096, rank 3 expects 4100".
TEST_P(MismatchOfMode, AllToAllvSplitsThatDoNotFit) {
  Shared<std::atomic<int>> told;
  run_ranks(kRanks,
            [&](int rank, moecclComm_t comm) {
              Buffers b(1000);
              size_t out[kRanks] = {10, 20, 30, 40}, in[kRanks], at[kRanks] = {0, 1000, 2000, 3000};
              for (size_t& c : in) c = out[rank];
              if (rank == 3) in[1] = 44;  // rank 1 sends 40 there
              const Stopwatch watch;
              const moecclResult_t result =
                  moecclAllToAllv(b.in.data(), out, at, b.out.data(), in, at, moecclFloat32, comm, nullptr);
              MOECCL_EXPECT_WITHIN(watch, kLimitMs);
              if (result == moecclSuccess) return;
              told->fetch_add(1);
              const std::string text = moecclGetLastError(comm);
              EXPECT_TRUE(result == moecclMismatch || (result == moecclRemoteError && rank != 3))
                  << moecclGetErrorString(result) << ": " << text;
              if (rank != 3) return;
              for (const char* part : {"rank 1", "rank 3", "40", "44"})
                EXPECT_NE(text.find(part), std::string::npos) << part << ": " << text;
            },
            {.mode = GetParam(), .deadline_ms = 30'000});
  EXPECT_GE(told->load(), 1);
}

TEST_P(MismatchOfMode, ConfigsThatMustAgree) {
  run_ranks(2,
            [](int rank, moecclComm_t) {
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.init_timeout_ms = static_cast<int32_t>(patient_ms(10'000));
              config.deterministic = rank;
              moecclComm_t comm = nullptr;
              const Stopwatch watch;
              EXPECT_EQ(moecclCommInitRankConfig(&comm, 2, unique_id(), rank, &config), moecclMismatch)
                  << moecclGetLastError(nullptr);
              MOECCL_EXPECT_WITHIN(watch, kLimitMs);
              const std::string text = moecclGetLastError(nullptr);
              EXPECT_NE(text.find("deterministic"), std::string::npos) << text;
              EXPECT_EQ(comm, nullptr);
            },
            {.mode = GetParam(), .init = false});
}

TEST_P(MismatchOfMode, NumbersOfRanks) {
  run_ranks(2,
            [](int rank, moecclComm_t) {
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.init_timeout_ms = static_cast<int32_t>(patient_ms(10'000));
              moecclComm_t comm = nullptr;
              const Stopwatch watch;
              EXPECT_EQ(moecclCommInitRankConfig(&comm, rank == 0 ? 2 : 3, unique_id(), rank, &config), moecclMismatch)
                  << moecclGetLastError(nullptr);
              MOECCL_EXPECT_WITHIN(watch, kLimitMs);
            },
            {.mode = GetParam(), .init = false});
}

TEST_P(MismatchOfMode, LayersOfDifferentShapes) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
              config.hidden_bytes = 64;
              config.top_k = 2;
              config.n_experts = rank == 0 ? 8 : 16;
              config.max_tokens = 10;
              moecclMoe_t moe = nullptr;
              const Stopwatch watch;
              EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclMismatch) << moecclGetLastError(comm);
              MOECCL_EXPECT_WITHIN(watch, kLimitMs);
              const std::string text = moecclGetLastError(comm);
              EXPECT_NE(text.find("experts"), std::string::npos) << text;
              config.n_experts = 8;
              config.trials = -rank;
              EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclMismatch) << moecclGetLastError(comm);
              EXPECT_NE(std::string(moecclGetLastError(comm))
                            .find("trials in moecclMoeCreate: rank 0 gives 0, rank 1 "
                                  "gives -1"),
                        std::string::npos)
                  << moecclGetLastError(comm);
            },
            {.mode = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Modes, MismatchOfMode, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

}  // namespace
}  // namespace moeccl::testing
