// SPDX-License-Identifier: Apache-2.0
// Ranks that disagree get moecclMismatch within 2 s, with a sentence that names both and the field. No rank hangs.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4;
constexpr int kOdd = 2;  // the rank that makes another call
constexpr int64_t kLimitMs = 2000;

// The call of one rank.
struct Call {
  moecclOp_t op = moecclOpAllReduce;
  size_t count = 4096;
  moecclDataType_t type = moecclFloat32;
  moecclRedOp_t reduce = moecclSum;
  int root = 0;
  const char* plan = nullptr;
};

struct Buffers {
  std::vector<double> in = std::vector<double>(1 << 17), out = std::vector<double>(1 << 17);
};

moecclResult_t perform(const Call& c, moecclComm_t comm, Buffers& b) {
  const void* in = b.in.data();
  void* out = b.out.data();
  if (c.plan != nullptr) {
    EXPECT_EQ(moecclPlanForce(comm, c.op, c.plan), moecclSuccess) << moecclGetLastError(comm);
  }
  switch (c.op) {
    case moecclOpAllReduce:
      return moecclAllReduce(in, out, c.count, c.type, c.reduce, comm, nullptr);
    case moecclOpReduce:
      return moecclReduce(in, out, c.count, c.type, c.reduce, c.root, comm, nullptr);
    case moecclOpBroadcast:
      return moecclBroadcast(in, out, c.count, c.type, c.root, comm, nullptr);
    case moecclOpAllGather:
      return moecclAllGather(in, out, c.count, c.type, comm, nullptr);
    case moecclOpReduceScatter:
      return moecclReduceScatter(in, out, c.count, c.type, c.reduce, comm, nullptr);
    case moecclOpAllToAll:
      return moecclAllToAll(in, out, c.count, c.type, comm, nullptr);
    case moecclOpGather:
      return moecclGather(in, out, c.count, c.type, c.root, comm, nullptr);
    case moecclOpScatter:
      return moecclScatter(in, out, c.count, c.type, c.root, comm, nullptr);
    default: {
      const size_t each[kRanks] = {c.count, c.count, c.count, c.count};
      const size_t at[kRanks] = {0, c.count, 2 * c.count, 3 * c.count};
      return moecclAllToAllv(in, each, at, out, each, at, c.type, comm, nullptr);
    }
  }
}

void expect_told(moecclResult_t result, moecclComm_t comm, const char* field) {
  const std::string text = moecclGetLastError(comm);
  EXPECT_EQ(result, moecclMismatch) << moecclGetErrorString(result) << ": " << text;
  EXPECT_NE(text.find("rank 2"), std::string::npos) << "the odd rank is not named: " << text;
  const bool another = text.find("rank 0") != std::string::npos || text.find("rank 1") != std::string::npos ||
                       text.find("rank 3") != std::string::npos;
  EXPECT_TRUE(another) << "the other rank is not named: " << text;
  EXPECT_NE(text.find(field), std::string::npos) << "the field " << field << " is not named: " << text;
}

// Every rank returns in time. A rank that waits for no other rank in this operation, such as a broadcast's root, cannot
// know of the mismatch and may succeed; the next operation at the latest tells it.
void expect_mismatch(const Call& usual, const Call& odd, const char* field, RankMode mode) {
  Shared<std::atomic<int>> told_at_once;
  Meeting agreed;
  const RankOptions options{.mode = mode, .deadline_ms = 30'000};
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        Buffers b;
        MOECCL_ASSERT_COMM_OK(perform(usual, comm, b), comm);  // they agree first
        ASSERT_TRUE(agreed.meet(kRanks));                      // all have finished it, see agreement_test.cc
        const Stopwatch watch;
        moecclResult_t result = perform(rank == kOdd ? odd : usual, comm, b);
        if (result != moecclSuccess) told_at_once->fetch_add(1);
        while (result == moecclSuccess && watch.fair_ms() < patient_ms(2 * kLimitMs)) result = perform(usual, comm, b);
        MOECCL_EXPECT_WITHIN(watch, kLimitMs);
        expect_told(result, comm, field);
        EXPECT_EQ(perform(usual, comm, b), moecclMismatch) << "the communicator stays in its error";
      },
      options);
  EXPECT_GE(told_at_once->load(), 1);
}

struct Matrix {
  moecclOp_t op;
  const char* name;
  bool reduces, rooted;
};
void PrintTo(const Matrix& m, std::ostream* out) { *out << m.name; }
constexpr Matrix kOperations[] = {
    {moecclOpAllReduce, "AllReduce", true, false},
    {moecclOpReduce, "Reduce", true, true},
    {moecclOpBroadcast, "Broadcast", false, true},
    {moecclOpAllGather, "AllGather", false, false},
    {moecclOpReduceScatter, "ReduceScatter", true, false},
    {moecclOpAllToAll, "AllToAll", false, false},
    {moecclOpGather, "Gather", false, true},
    {moecclOpScatter, "Scatter", false, true},
};

class Mismatch : public ::testing::TestWithParam<std::tuple<Matrix, RankMode>> {
 protected:
  Matrix op() const { return std::get<0>(GetParam()); }
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
                         ::testing::Combine(::testing::ValuesIn(kOperations),
                                            ::testing::Values(RankMode::kThreads, RankMode::kProcesses)),
                         [](const ::testing::TestParamInfo<std::tuple<Matrix, RankMode>>& info) {
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
              Buffers b;
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
