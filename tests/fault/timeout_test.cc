// SPDX-License-Identifier: Apache-2.0
// A rank that never comes: the others end within the timeout + 1 s, and the sentence names the operation and the
// missing ranks.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <thread>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

class Timeout : public ::testing::TestWithParam<RankMode> {};

constexpr int kTimeoutMs = 700;

// The ranks of a test on their way into the call. The first one's deadline ends the call for all.
struct Begin {
  Meeting ready;
  Shared<std::atomic<int64_t>> first_ms;
  // Returns when n ranks have come.
  void meet(int n) {
    EXPECT_TRUE(ready.meet(n));
    int64_t none = 0;
    first_ms->compare_exchange_strong(none, now_ms());
  }
};

void expect_timeout(moecclResult_t result, const Stopwatch& watch, int64_t first_ms, const std::string& text,
                    const std::vector<const char*>& parts) {
  EXPECT_EQ(result, moecclTimeout) << moecclGetErrorString(result) << ": " << text;
  EXPECT_GE(now_ms() - first_ms, kTimeoutMs - 50);
  MOECCL_EXPECT_WITHIN(watch, kTimeoutMs + 1000);
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " is not named: " << text;
}

TEST_P(Timeout, NamesTheOperationAndTheMissingRank) {
  RankOptions options{.mode = GetParam()};
  options.config.timeout_ms = kTimeoutMs;
  Meeting late;  // the missing rank stays until the others have given up
  Begin begin;
  run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        if (rank == 1) {
          EXPECT_TRUE(late.wait_for(2));
          return;
        }
        std::vector<float> data(1000);
        begin.meet(2);
        const Stopwatch watch;
        const moecclResult_t r =
            moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, nullptr);
        late.arrive();
        expect_timeout(r, watch, begin.first_ms->load(), moecclGetLastError(comm), {"allreduce", "rank 1"});
        EXPECT_EQ(moecclAllReduce(data.data(), data.data(), 1, moecclFloat32, moecclSum, comm, nullptr), r)
            << "it stays in its error";
      },
      options);
}

// Plans of many ranks wait for each other in chains, and what is said is cut. The rank that never came is named by all,
// and no other.
void names_the_missing_rank_alone(RankMode mode, int n, const char* others) {
  const int missing = n - 2;
  RankOptions options{.mode = mode};
  options.config.timeout_ms = 2 * kTimeoutMs;
  Meeting late;
  Begin begin;
  run_ranks(
      n,
      [&](int rank, moecclComm_t comm) {
        std::vector<float> data(1000);
        MOECCL_ASSERT_COMM_OK(
            moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, nullptr), comm);
        if (rank == missing) {
          EXPECT_TRUE(late.wait_for(n - 1));
          return;
        }
        begin.meet(n - 1);
        EXPECT_EQ(moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, nullptr),
                  moecclTimeout);
        const std::string text = moecclGetLastError(comm);
        late.arrive();
        const size_t at = text.find("unresponsive: ");
        ASSERT_NE(at, std::string::npos) << text;
        EXPECT_EQ(text.find("rank " + std::to_string(missing) + " (", at), at + 14) << text;
        EXPECT_EQ(text.find("rank ", at + 15), std::string::npos) << text;
        EXPECT_NE(text.find(others, at), std::string::npos) << text;
        EXPECT_EQ(text.find(" failed: rank "), std::string::npos)
            << "only the rank that reported it is named: " << text;
      },
      options);
}

TEST_P(Timeout, NamesNoRankThatWaitsItself) {
  names_the_missing_rank_alone(GetParam(), 16, "14 others are in it");
  names_the_missing_rank_alone(GetParam(), 3, "1 other is in it");
}

TEST_P(Timeout, NamesSeveralMissingRanks) {
  RankOptions options{.mode = GetParam()};
  options.config.timeout_ms = kTimeoutMs;
  Meeting late;  // the missing rank stays until the others have given up
  Begin begin;
  run_ranks(
      5,
      [&](int rank, moecclComm_t comm) {
        if (rank == 1 || rank == 3) {
          EXPECT_TRUE(late.wait_for(3));
          return;
        }
        std::vector<float> in(100), out(500);
        begin.meet(3);
        const Stopwatch watch;
        const moecclResult_t r = moecclAllGather(in.data(), out.data(), 100, moecclFloat32, comm, nullptr);
        late.arrive();
        expect_timeout(r, watch, begin.first_ms->load(), moecclGetLastError(comm), {"allgather", "1", "3"});
      },
      options);
}

TEST_P(Timeout, OfARecvNamesThePeer) {
  RankOptions options{.mode = GetParam()};
  options.config.timeout_ms = kTimeoutMs;
  Meeting late;  // the missing rank stays until the others have given up
  Begin begin;
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        if (rank == 1) {
          EXPECT_TRUE(late.wait_for(1));
          return;
        }
        float value = 0;
        begin.meet(1);
        const Stopwatch watch;
        const moecclResult_t r = moecclRecv(&value, 1, moecclFloat32, 1, comm, nullptr);
        late.arrive();
        expect_timeout(r, watch, begin.first_ms->load(), moecclGetLastError(comm), {"rank 1"});
      },
      options);
}

TEST_P(Timeout, OfInitNamesTheMissingRanks) {
  Begin begin;
  run_ranks(4,
            [&begin](int rank, moecclComm_t) {
              if (rank == 2) return;
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.init_timeout_ms = kTimeoutMs;
              moecclComm_t comm = nullptr;
              begin.meet(3);
              const Stopwatch watch;
              const moecclResult_t r = moecclCommInitRankConfig(&comm, 4, unique_id(), rank, &config);
              expect_timeout(r, watch, begin.first_ms->load(), moecclGetLastError(nullptr), {"2"});
            },
            {.mode = GetParam(), .init = false});
}

INSTANTIATE_TEST_SUITE_P(Modes, Timeout, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

// A stopped process looks like a slow one until the timeout. Then it is named, and when it continues it sees the
// failure.
TEST(TimeoutOfProcess, AStoppedProcessIsNamedAndHarmsNothingWhenItGoesOn) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.config.timeout_ms = kTimeoutMs;
  Meeting failed;
  Shared<std::atomic<int64_t>> stopped_ms;
  options.on_running = [&](const std::vector<pid_t>& pid_of_rank) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    stopped_ms->store(fair_now_ms());
    kill(pid_of_rank[2], SIGSTOP);
    EXPECT_TRUE(failed.wait_for(2));
    kill(pid_of_rank[2], SIGCONT);
  };
  run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        std::vector<float> data(5000, 1);
        moecclResult_t r = moecclSuccess;
        const Stopwatch watch;
        while (r == moecclSuccess && watch.fair_ms() < patient_ms(10'000)) {
          r = moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclMax, comm, nullptr);
        }
        failed.arrive();
        EXPECT_NE(r, moecclSuccess);
        if (rank == 2) return;
        EXPECT_LE(fair_now_ms() - stopped_ms->load(), patient_ms(kTimeoutMs + 1000));
        // The first rank to time out may be the one that the other rank names.
        const std::string text = moecclGetLastError(comm);
        EXPECT_NE(text.find("rank 2"), std::string::npos) << moecclGetErrorString(r) << ": " << text;
        for (float f : data) ASSERT_EQ(f, 1.0f);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
