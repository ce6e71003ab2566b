// SPDX-License-Identifier: Apache-2.0
// kill -9 of ranks at random points, also while the others form the new group: the survivors shrink and go on, and
// their next collective is right within 3 s. MOECCL_TEST_KILLS sets the number of kills of each kind (default 8).
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

constexpr int kLimitMs = 3000;

struct Trial {
  int n = 0;
  std::vector<int> victims;
  int delay_us = 0;
  int second_after_us = 0;
  size_t count = 0;
  bool heap = false;
};

Trial draw(uint64_t seed) {
  std::mt19937_64 random(seed);
  Trial t;
  t.n = 3 + static_cast<int>(random() % 4);
  const int n_victims = t.n > 3 && random() % 2 == 0 ? 2 : 1;
  while (static_cast<int>(t.victims.size()) < n_victims) {
    // Rank 0 leads the others' meeting unless it is the one that died.
    const int v = random() % 3 == 0 ? 0 : static_cast<int>(random() % static_cast<uint64_t>(t.n));
    if (std::find(t.victims.begin(), t.victims.end(), v) == t.victims.end()) t.victims.push_back(v);
  }
  t.delay_us = static_cast<int>(random() % 40'000);
  t.second_after_us = static_cast<int>(random() % 60'000);
  t.count = (size_t{1} << (random() % 17)) + 1;
  t.heap = random() % 2 == 0;
  return t;
}

struct Words {
  std::atomic<int64_t> killed_ms;  // of the last kill
  std::atomic<int> all_killed;
  std::atomic<int64_t> slowest_ms;
  std::atomic<int> shrinks;
};

// Every rank contributes its previous number and whether it knows that all victims are killed.
struct Answer {
  int32_t numbers = 0, know = 0;
};

bool all_reduce(const Trial& trial, int32_t* in, int32_t* out, int rank, int know, moecclComm_t comm, Answer* answer) {
  std::fill_n(in, trial.count + 1, 1 << rank);
  in[0] = know;
  if (moecclAllReduce(in, out, trial.count + 1, moecclInt32, moecclSum, comm, nullptr) != moecclSuccess) return false;
  *answer = {out[1], out[0]};
  // All elements except the first are equal, so any that differs is wrong.
  const int64_t different = std::count_if(out + 1, out + trial.count + 1, [&](int32_t v) { return v != out[1]; });
  EXPECT_EQ(different, 0);
  return true;
}

int32_t expected_numbers(const Trial& trial) {
  int32_t all = (1 << trial.n) - 1;
  for (const int v : trial.victims) all &= ~(1 << v);
  return all;
}

void run_rank(const Trial& trial, int rank, moecclComm_t comm, Words& words, Meeting& end) {
  const int n_left = trial.n - static_cast<int>(trial.victims.size());
  void* memory[2] = {nullptr, nullptr};
  for (void*& m : memory) {
    if (trial.heap)
      MOECCL_ASSERT_OK(moecclMemAlloc(&m, (trial.count + 1) * sizeof(int32_t)));
    else
      m = calloc(trial.count + 1, sizeof(int32_t));
  }
  auto* const in = static_cast<int32_t*>(memory[0]);
  auto* const out = static_cast<int32_t*>(memory[1]);
  const Stopwatch watch;
  for (bool finished = false; !finished;) {
    ASSERT_LT(watch.fair_ms(), patient_ms(30'000)) << "no end: " << moecclGetLastError(comm);
    const int know = words.all_killed.load();
    Answer answer;
    if (all_reduce(trial, in, out, rank, know, comm, &answer)) {
      int n = 0;
      MOECCL_EXPECT_OK(moecclCommCount(comm, &n));
      finished = answer.know == n && n == n_left;
      if (!finished) continue;
      EXPECT_EQ(answer.numbers, expected_numbers(trial));
      const int64_t took = fair_now_ms() - words.killed_ms.load();
      int64_t slowest = words.slowest_ms.load();
      while (took > slowest && !words.slowest_ms.compare_exchange_weak(slowest, took)) {
      }
      EXPECT_LE(took, patient_ms(kLimitMs));
      break;
    }
    moecclComm_t left = nullptr;
    const moecclResult_t result = moecclCommShrink(comm, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT);
    ASSERT_EQ(result, moecclSuccess) << "rank " << rank << ": " << moecclGetLastError(comm);
    words.shrinks++;
    (void)moecclCommDestroy(comm);
    comm = left;
  }
  // No rank leaves before all have arrived, because a rank that has left does not count as a survivor.
  EXPECT_TRUE(end.meet(n_left));
  MOECCL_EXPECT_OK(moecclCommDestroy(comm));
  for (void* m : memory) {
    if (trial.heap)
      MOECCL_EXPECT_OK(moecclMemFree(m));
    else
      free(m);
  }
}

void kill_and_go_on(bool several_hosts) {
  std::unique_ptr<TestHosts> hosts;
  if (several_hosts) {
    std::string why;
    hosts = TestHosts::create({.weights = {2, 1}, .named = true}, &why);
    ASSERT_NE(hosts, nullptr) << why;
  }
  const char* given = getenv("MOECCL_TEST_KILLS");
  const int n_trials = given != nullptr ? atoi(given) : scaled(8);
  int64_t slowest = 0;
  int shrinks = 0;
  std::vector<int64_t> times;
  for (int i = 0; i < n_trials && !::testing::Test::HasFailure(); ++i) {
    const Trial trial = draw(test_seed() * 100'000 + static_cast<uint64_t>(i));
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", trial " << i << ": " << trial.n
                                      << " ranks, victim " << trial.victims[0] << " after " << trial.delay_us << " us, "
                                      << trial.victims.size() << " victims, the second " << trial.second_after_us
                                      << " us later, " << trial.count << " elements");
    const Shared<Words> words;
    Meeting end;
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 60'000, .destroy = false};
    options.hosts = hosts.get();
    options.may_die = {trial.victims.begin(), trial.victims.end()};
    options.on_running = [&](const std::vector<pid_t>& pid_of_rank) {
      std::this_thread::sleep_for(std::chrono::microseconds(trial.delay_us));
      for (const int victim : trial.victims) {
        if (victim != trial.victims[0]) std::this_thread::sleep_for(std::chrono::microseconds(trial.second_after_us));
        words->killed_ms = fair_now_ms();
        kill(pid_of_rank[static_cast<size_t>(victim)], SIGKILL);
      }
      words->all_killed = 1;
    };
    run_ranks(
        trial.n, [&](int rank, moecclComm_t comm) { run_rank(trial, rank, comm, *words, end); }, options);
    slowest = std::max<int64_t>(slowest, words->slowest_ms);
    shrinks += words->shrinks;
    times.push_back(words->slowest_ms);
  }
  if (times.empty()) return;
  std::sort(times.begin(), times.end());
  printf("%d trials, %d shrinks: from the last kill to the next right collective %lld ms in the median, %lld at most\n",
         n_trials, shrinks, static_cast<long long>(times[times.size() / 2]), static_cast<long long>(slowest));
}

// Rank 1 waits for rank 0 on a part of the communicator, and rank 0 would wait for rank 1 in the shrink, if it did not
// revoke the part first.
TEST(Shrink, ARevokedPartLetsItsRanksComeToTheShrinkOfAnother) {
  constexpr int kVictim = 2;
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 60'000, .destroy = false, .may_die = {kVictim}};
  run_ranks(
      3,
      [](int rank, moecclComm_t comm) {
        moecclComm_t part = nullptr, left = nullptr;
        MOECCL_ASSERT_OK(moecclCommSplit(comm, rank / 2, rank, &part, nullptr));
        int32_t in = 1, out = 0;
        MOECCL_ASSERT_OK(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, comm, nullptr));
        if (rank == kVictim) raise(SIGKILL);
        const Stopwatch watch;
        moecclComm_t const waits_on = rank == 0 ? comm : part;
        const moecclResult_t result = moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, waits_on, nullptr);
        EXPECT_EQ(result, rank == 0 ? moecclRemoteError : moecclAborted) << moecclGetLastError(waits_on);
        if (rank == 0) {
          MOECCL_EXPECT_OK(moecclCommRevoke(part));
        }
        ASSERT_EQ(moecclCommShrink(comm, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT), moecclSuccess)
            << moecclGetLastError(comm);
        MOECCL_ASSERT_OK(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, left, nullptr));
        EXPECT_EQ(out, 2);
        MOECCL_EXPECT_WITHIN(watch, kLimitMs);
        for (moecclComm_t one : {part, comm, left}) MOECCL_EXPECT_OK(moecclCommDestroy(one));
      },
      options);
}

TEST(Shrink, KillsAndTheNextCollectiveIsRightOnOneHost) { kill_and_go_on(false); }
TEST(Shrink, KillsAndTheNextCollectiveIsRightBetweenHosts) { kill_and_go_on(true); }

}  // namespace
}  // namespace moeccl::testing
