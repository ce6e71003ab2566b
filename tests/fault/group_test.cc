// SPDX-License-Identifier: Apache-2.0
// A sender fails for another reason while its message is in flight: the receiver gets an error or all of the right
// data. The sender's group holds a second member that does not match its partner, or the sender is killed, or it
// aborts. MOECCL_TEST_GROUP_TRIALS sets the number of trials of each kind.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

enum class Ends { kMismatch, kKill, kAbort };

struct Trial {
  Ends ends = Ends::kMismatch;
  size_t count = 0;
  int delay_us = 0;
  bool heap = false;
};
struct Seen {
  std::atomic<uint64_t> right, wrong, failed;
};

int32_t value(size_t i) { return static_cast<int32_t>(i) + 7; }

// Rank 0 sends to rank 3 and, in the same group, receives a message from rank 2 that does not match.
void run_rank(const Trial& trial, int rank, moecclComm_t comm, Seen& seen) {
  const size_t bytes = trial.count * sizeof(int32_t);
  void* memory[2] = {nullptr, nullptr};
  for (void*& m : memory) {
    if (trial.heap) {
      MOECCL_ASSERT_OK(moecclMemAlloc(&m, bytes));
    } else {
      m = malloc(bytes);
    }
  }
  auto* const data = static_cast<int32_t*>(memory[0]);
  auto* const other = static_cast<int32_t*>(memory[1]);
  if (rank == 0) {
    for (size_t i = 0; i < trial.count; ++i) data[i] = value(i);
    std::thread aborter;
    if (trial.ends == Ends::kAbort) {
      aborter = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::microseconds(trial.delay_us));
        EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
      });
    }
    moecclResult_t result = moecclGroupStart();
    if (result == moecclSuccess) result = moecclSend(data, trial.count, moecclInt32, 3, comm, nullptr);
    if (trial.ends == Ends::kMismatch && result == moecclSuccess) {
      result = moecclRecv(other, 100, moecclInt32, 2, comm, nullptr);
    }
    const moecclResult_t end = moecclGroupEnd();
    if (trial.ends == Ends::kMismatch) {
      EXPECT_EQ(end, moecclMismatch) << moecclGetLastError(comm);
    }
    // The group has returned, so its memory may be used for something else.
    std::fill_n(data, trial.count, -1);
    if (aborter.joinable()) aborter.join();
  } else if (rank == 2 && trial.ends == Ends::kMismatch) {
    std::this_thread::sleep_for(std::chrono::microseconds(trial.delay_us));
    (void)moecclSend(data, 101, moecclInt32, 0, comm, nullptr);
  } else if (rank == 3) {
    std::fill_n(data, trial.count, -2);
    if (moecclRecv(data, trial.count, moecclInt32, 0, comm, nullptr) != moecclSuccess) {
      seen.failed++;
    } else {
      size_t bad = 0;
      for (size_t i = 0; i < trial.count; ++i) bad += data[i] != value(i);
      EXPECT_EQ(bad, 0u) << "of " << trial.count << " elements of a message that was received with success";
      ++(bad == 0 ? seen.right : seen.wrong);
    }
  }
  for (void* m : memory) {
    if (trial.heap) {
      EXPECT_EQ(moecclMemFree(m), moecclSuccess);
    } else {
      free(m);
    }
  }
}

void run_trials(Ends ends, bool several_hosts, int usual) {
  std::unique_ptr<TestHosts> hosts;
  if (several_hosts) {
    std::string why;
    hosts = TestHosts::create({.weights = {1, 1}, .named = true}, &why);
    ASSERT_NE(hosts, nullptr) << why;
  }
  const char* given = getenv("MOECCL_TEST_GROUP_TRIALS");
  const int n_trials = given != nullptr ? atoi(given) : scaled(usual);
  Shared<Seen> seen;
  for (int i = 0; i < n_trials && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 100'000 + static_cast<uint64_t>(i));
    Trial trial{ends};
    trial.count = (size_t{1} << (10 + random() % 12)) + random() % 1000;
    trial.delay_us = static_cast<int>(random() % 5000);
    trial.heap = random() % 2 == 0;
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", trial " << i << ": " << trial.count
                                      << " elements, " << trial.delay_us << " us");
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000};
    options.hosts = hosts.get();
    if (ends == Ends::kKill) {
      options.may_die = {0};
      options.on_running = [&](const std::vector<pid_t>& pids) {
        std::this_thread::sleep_for(std::chrono::microseconds(trial.delay_us));
        kill(pids[0], SIGKILL);
      };
    }
    run_ranks(
        4, [&](int rank, moecclComm_t comm) { run_rank(trial, rank, comm, *seen); }, options);
  }
  printf("%d trials: the receiver had the right data %llu times, an error %llu times\n", n_trials,
         static_cast<unsigned long long>(seen->right), static_cast<unsigned long long>(seen->failed));
  EXPECT_EQ(seen->wrong, 0u);
}

TEST(Group, AFailingMemberNeverGivesOthersWrongDataOnOneHost) { run_trials(Ends::kMismatch, false, 20); }
TEST(Group, AFailingMemberNeverGivesOthersWrongDataBetweenHosts) { run_trials(Ends::kMismatch, true, 20); }
TEST(Group, AKilledSenderNeverGivesWrongDataOnOneHost) { run_trials(Ends::kKill, false, 10); }
TEST(Group, AKilledSenderNeverGivesWrongDataBetweenHosts) { run_trials(Ends::kKill, true, 10); }
TEST(Group, AnAbortingSenderNeverGivesWrongDataOnOneHost) { run_trials(Ends::kAbort, false, 10); }
TEST(Group, AnAbortingSenderNeverGivesWrongDataBetweenHosts) { run_trials(Ends::kAbort, true, 10); }

}  // namespace
}  // namespace moeccl::testing
