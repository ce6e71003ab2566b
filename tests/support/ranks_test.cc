// SPDX-License-Identifier: Apache-2.0
// Tests the helper itself: a rank's findings reach the test with the rank's name, and nothing hangs.
#include "tests/support/ranks.h"

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <thread>

namespace moeccl::testing {
namespace {

// Runs fn and returns all that run_ranks reported, instead of failing this test.
std::string reported(int n, const RankFunction& fn, const RankOptions& options) {
  ::testing::TestPartResultArray found;
  bool ok = true;
  {
    ::testing::ScopedFakeTestPartResultReporter reporter(
        ::testing::ScopedFakeTestPartResultReporter::INTERCEPT_ALL_THREADS, &found);
    ok = run_ranks(n, fn, options);
  }
  EXPECT_EQ(ok, found.size() == 0);
  std::string text;
  for (int i = 0; i < found.size(); ++i) text += std::string(found.GetTestPartResult(i).message()) + "\n";
  return text;
}

class Ranks : public ::testing::TestWithParam<RankMode> {
 protected:
  RankOptions options() const { return {.mode = GetParam(), .init = false}; }
};

TEST_P(Ranks, RunEachOnce) {
  Shared<std::atomic<int>> seen[5];
  EXPECT_EQ(reported(
                5, [&](int rank, moecclComm_t) { seen[rank]->fetch_add(1); }, options()),
            "");
  for (const auto& s : seen) EXPECT_EQ(s->load(), 1);
}

TEST_P(Ranks, LiveInAsManyProcessesAsTheModeSays) {
  Shared<std::atomic<pid_t>> pids[4];
  EXPECT_EQ(reported(
                4, [&](int rank, moecclComm_t) { *pids[rank] = getpid(); }, options()),
            "");
  std::set<pid_t> different;
  for (const auto& p : pids) different.insert(p->load());
  EXPECT_EQ(different.size(), GetParam() == RankMode::kThreads ? 1u : GetParam() == RankMode::kProcesses ? 4u : 2u);
  EXPECT_FALSE(different.contains(getpid()));
}

TEST_P(Ranks, ReportFailedExpectationsWithTheirName) {
  const std::string text = reported(
      4,
      [](int rank, moecclComm_t) {
        set_note("adding up");
        EXPECT_NE(rank, 2) << "not this one";
        ASSERT_NE(rank, 3) << "nor that";
      },
      options());
  for (const char* part : {"rank 2", "not this one", "rank 3", "nor that", "adding up"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  EXPECT_EQ(text.find("rank 1"), std::string::npos) << text;
}

TEST_P(Ranks, ThatHangAreKilledAndNamed) {
  RankOptions o = options();
  o.deadline_ms = 300;
  const Stopwatch watch;
  const std::string text = reported(
      3,
      [](int rank, moecclComm_t) {
        set_note("waiting for nothing");
        while (rank == 1) usleep(1000);
      },
      o);
  MOECCL_EXPECT_WITHIN(watch, 5000);
  for (const char* part : {"rank 1", "hangs", "waiting for nothing"})
    EXPECT_NE(text.find(part), std::string::npos) << text;
  EXPECT_EQ(text.find("rank 0"), std::string::npos) << text;
}

TEST_P(Ranks, ThatDieAreNamed) {
  const std::string text = reported(
      3,
      [](int rank, moecclComm_t) {
        if (rank == 2) raise(SIGKILL);
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
      },
      options());
  for (const char* part : {"rank 2", "signal 9"}) EXPECT_NE(text.find(part), std::string::npos) << text;
}

INSTANTIATE_TEST_SUITE_P(Modes, Ranks, ::testing::Values(RankMode::kThreads, RankMode::kProcesses, RankMode::kMixed),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

TEST(RanksThatMayDie, AreNoFailure) {
  EXPECT_EQ(reported(3,
                     [](int rank, moecclComm_t) {
                       if (rank == 2) raise(SIGKILL);
                     },
                     {.mode = RankMode::kProcesses, .init = false, .may_die = {2}}),
            "");
}

TEST(RanksThatMayDie, AreNamedWhenAnotherOneDoes) {
  const std::string text = reported(3,
                                    [](int rank, moecclComm_t) {
                                      if (rank == 1) raise(SIGKILL);
                                    },
                                    {.mode = RankMode::kProcesses, .init = false, .may_die = {2}});
  EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
}

TEST(RanksHooks, RunInTheTestsProcessWithAllPids) {
  Shared<std::atomic<int>> phase;
  RankOptions options{.mode = RankMode::kProcesses, .init = false};
  std::vector<pid_t> first, second;
  options.on_ready = [&](const std::vector<pid_t>& pids) {
    first = pids;
    *phase = 1;
  };
  options.on_running = [&](const std::vector<pid_t>& pids) { second = pids; };
  EXPECT_EQ(reported(
                3, [&](int, moecclComm_t) { EXPECT_EQ(phase->load(), 1); }, options),
            "");
  EXPECT_EQ(first.size(), 3u);
  EXPECT_EQ(first, second);
}

}  // namespace
}  // namespace moeccl::testing
