// SPDX-License-Identifier: Apache-2.0
// kill -9 of a process rank in every stage of a communicator's life, from init to its end: every survivor finishes all
// its calls within 2 s, and calls that fail name the rank that died. MOECCL_TEST_KILLS sets the number of kills
// (default 16). Printed are the failures that a survivor saw, and the kills that came before the stage was over.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kLimitMs = 2000, kInitMs = 1500;

enum Stage : int { kInit, kOperation, kGrow, kSplit, kInPart, kEndOfPart, kFinalize, kAbort, kStages };
constexpr std::array<const char*, kStages> kNames = {"init",       "operation", "grow", "split", "part's operation",
                                                     "part's end", "finalize",  "abort"};

struct Trial {
  int n, n_new;  // at first, and ranks that join in kGrow
  int victim, delay_us;
  Stage stage;
  bool aborts;  // calls moecclCommAbort instead of moecclCommFinalize and moecclCommDestroy
};

Trial draw(uint64_t seed, Stage stage) {
  std::mt19937_64 random(seed);
  const int n = 2 + static_cast<int>(random() % 4), n_new = stage == kGrow ? 1 : 0;
  // The last three stages take microseconds, a grow milliseconds.
  const uint64_t within_us = stage >= kEndOfPart ? 21 : stage == kGrow ? 12'000 : 2000;
  return {n,
          n_new,
          static_cast<int>(random() % static_cast<uint64_t>(n + n_new)),
          static_cast<int>(random() % within_us),
          stage,
          stage == kAbort || (stage != kFinalize && random() % 2 == 0)};
}

struct Words {
  std::atomic<int> stage;  // of the victim
  std::atomic<int64_t> killed_ms, slowest_ms;
  std::atomic<int> n_failed;
  std::atomic<bool> has_id;
  moecclUniqueId id;  // of the grow
};

// One rank's life: it reports its stage and checks the results of its calls.
class Life {
 public:
  Life(const Trial& trial, int rank, Words& words) : trial_(trial), rank_(rank), words_(words) {}

  void live() {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.init_timeout_ms = kInitMs;
    config.timeout_ms = 20'000;
    if (rank_ >= trial_.n) return through(grow(nullptr) ? kInitMs : 0);
    enter(kInit);
    moecclComm_t comm = nullptr, part = nullptr;
    const moecclResult_t joined = moecclCommInitRankConfig(&comm, trial_.n, unique_id(), rank_, &config);
    const std::string why = moecclGetLastError(nullptr);
    // A victim that died before it identified itself can only be reported as missing. A rank that comes after the
    // others were told finds no listener.
    const bool missed = joined == moecclTimeout, alone = why.find("nobody listens") != std::string::npos;
    if (trial_.stage == kInit && joined != moecclSuccess && (missed || alone)) return through(missed ? kInitMs : 0);
    if (!right(joined, why, trial_.victim)) return through(0);
    bool whole = sums(comm, kOperation, trial_.n, trial_.victim);
    const bool waited = whole && trial_.n_new > 0 && grow(comm);
    // A new rank's death does not concern the old communicator.
    if (trial_.n_new > 0) whole = sums(comm, kGrow, trial_.n, trial_.victim < trial_.n ? trial_.victim : -1);
    enter(kSplit);
    if (whole) {
      const moecclResult_t made = moecclCommSplit(comm, rank_ % 2, rank_, &part, nullptr);
      whole = right(made, moecclGetLastError(comm), trial_.victim);
    }
    if (part != nullptr) {
      // Numbers are those of the part: even ranks are one part, odd ranks the other.
      const bool of_part = rank_ % 2 == trial_.victim % 2;
      sums(part, kInPart, (trial_.n + 1 - rank_ % 2) / 2, of_part ? trial_.victim / 2 : -1);
      enter(kEndOfPart);
      end(part, of_part ? trial_.victim / 2 : -1);
    }
    enter(trial_.aborts ? kAbort : kFinalize);
    end(comm, trial_.victim);
    through(waited ? kInitMs : 0);
  }

 private:
  // Grows `comm` (a new rank passes null) and uses the result. Returns whether it waited for the victim to come.
  bool grow(moecclComm_t comm) {
    moecclConfig_t config = MOECCL_CONFIG_INIT;
    config.init_timeout_ms = kInitMs, config.timeout_ms = 20'000;
    if (rank_ == 0) {
      MOECCL_EXPECT_COMM_OK(moecclCommGetUniqueId(comm, &words_.id), comm);
      words_.has_id = true;
    }
    for (const Stopwatch watch; comm == nullptr && !words_.has_id && watch.fair_ms() < patient_ms(10'000);) usleep(20);
    enter(kGrow);
    moecclComm_t grown = nullptr;
    const bool knows_id = rank_ == 0 || comm == nullptr;
    const moecclResult_t result = moecclCommGrow(comm, trial_.n + 1, knows_id ? &words_.id : nullptr,
                                                 comm == nullptr ? rank_ : -1, &grown, &config);
    const std::string why = moecclGetLastError(comm);
    if (result == moecclSuccess) {
      sums(grown, kGrow, trial_.n + 1, trial_.victim);
      MOECCL_EXPECT_OK(moecclCommDestroy(grown));
      return false;
    }
    // As in init, a victim may not have come, and a new rank may find no listener.
    ++words_.n_failed;
    const bool alone = comm == nullptr && why.find("nobody listens") != std::string::npos;
    EXPECT_TRUE(result == moecclTimeout || result == moecclRemoteError) << why;
    EXPECT_TRUE(alone || why.find(std::to_string(trial_.victim)) != std::string::npos) << why;
    return result == moecclTimeout;
  }
  bool is_victim() const { return rank_ == trial_.victim; }
  void enter(Stage stage) {
    if (is_victim()) words_.stage = stage;
  }
  // Returns true on success. Otherwise expects a failure that names the victim, and returns false. `number` is -1 where
  // there is no victim.
  bool right(moecclResult_t result, const std::string& text, int number) {
    if (result == moecclSuccess) return true;
    ++words_.n_failed;
    EXPECT_EQ(result, moecclRemoteError) << text;
    EXPECT_NE(text.find("rank " + std::to_string(number)), std::string::npos) << "rank " << number << " died: " << text;
    return false;
  }
  bool sums(moecclComm_t comm, Stage stage, int n, int number) {
    enter(stage);
    int32_t one = 1, sum = 0;
    const moecclResult_t result = moecclAllReduce(&one, &sum, 1, moecclInt32, moecclSum, comm, nullptr);
    if (result == moecclSuccess) {
      EXPECT_EQ(sum, n);
    }
    return right(result, moecclGetLastError(comm), number);
  }
  void end(moecclComm_t comm, int number) {
    if (trial_.aborts) {
      MOECCL_EXPECT_OK(moecclCommAbort(comm));
      return;
    }
    right(moecclCommFinalize(comm), moecclGetLastError(comm), number);
    MOECCL_EXPECT_OK(moecclCommDestroy(comm));
  }
  // The victim waits to be killed at its current stage. The others check the time.
  void through(int64_t more_ms) {
    if (is_victim()) words_.stage = kStages;
    for (const Stopwatch watch; words_.killed_ms.load() == 0 || is_victim();) {
      ASSERT_LT(watch.fair_ms(), patient_ms(10'000)) << "nobody was killed";
      usleep(1000);
    }
    const int64_t waited = fair_now_ms() - words_.killed_ms.load() - more_ms;
    EXPECT_LE(waited, patient_ms(kLimitMs)) << "rank " << rank_ << " was late";
    for (int64_t seen = words_.slowest_ms.load();
         waited > seen && !words_.slowest_ms.compare_exchange_weak(seen, waited);) {
    }
  }

  const Trial& trial_;
  int rank_;
  Words& words_;
};

TEST(Kill, InEveryStageOfACommunicatorsLife) {
  const char* given = std::getenv("MOECCL_TEST_KILLS");
  const int n_kills = given != nullptr ? std::atoi(given) : std::max<int>(kStages, scaled(16));
  std::array<int, kStages> killed{}, seen{}, inside{};
  int64_t slowest = 0;
  // A kill often comes too late for the last three stages, which are over at once.
  constexpr int kMoreTries = 100;
  const auto hit_an_end = [&] { return inside[kEndOfPart] + inside[kFinalize] + inside[kAbort] > 0; };
  for (int i = 0; (i < n_kills || (!hit_an_end() && i < n_kills + kMoreTries)) && !HasFailure(); ++i) {
    const auto stage = static_cast<Stage>(i < n_kills ? i % kStages : kEndOfPart + i % (kStages - kEndOfPart));
    const Trial trial = draw(test_seed() * 100'000 + static_cast<uint64_t>(i), stage);
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", kill " << i << ": rank "
                                      << trial.victim << " of " << trial.n << ", " << trial.delay_us << " us after its "
                                      << kNames[trial.stage] << " began" << (trial.aborts ? ", ends by abort" : ""));
    Shared<Words> words;
    words->stage = -1;
    const auto kill_victim = [&](const std::vector<pid_t>& pid_of_rank) {
      // Sleeps take longer than the last stages.
      const bool brief = trial.stage >= kEndOfPart;
      const Stopwatch watch;
      const auto await = [&](int stage, bool sleeps) {
        while (words->stage < stage && watch.fair_ms() < patient_ms(10'000))
          if (sleeps) usleep(20);
      };
      await(brief ? trial.stage - 1 : trial.stage, true);
      await(trial.stage, false);
      const std::chrono::microseconds delay(trial.delay_us);
      const auto began = std::chrono::steady_clock::now();
      if (!brief) std::this_thread::sleep_for(delay);
      while (std::chrono::steady_clock::now() - began < delay) continue;
      kill(pid_of_rank[static_cast<size_t>(trial.victim)], SIGKILL);
      words->killed_ms = fair_now_ms();
    };
    run_ranks(trial.n + trial.n_new, [&](int rank, moecclComm_t) { Life(trial, rank, *words).live(); },
              {.mode = RankMode::kProcesses,
               .deadline_ms = 30'000,
               .init = false,
               .may_die = {trial.victim},
               .on_running = kill_victim});
    ++killed[trial.stage];
    inside[trial.stage] += words->stage == trial.stage ? 1 : 0;
    seen[trial.stage] += words->n_failed > 0 ? 1 : 0;
    slowest = std::max(slowest, words->slowest_ms.load());
  }
  EXPECT_TRUE(hit_an_end() || HasFailure()) << "no kill came before the stage was over";
  std::string stages;
  for (int s = 0; s < kStages; ++s)
    stages += std::string(s > 0 ? ", " : "") + kNames[s] + " " + std::to_string(killed[s]) + " (" +
              std::to_string(seen[s]) + " seen, " + std::to_string(inside[s]) + " inside)";
  printf("%d kills in stages: %s; slowest survivor %ld ms (limit %d)\n", n_kills, stages.c_str(),
         static_cast<long>(slowest), kLimitMs);
}

}  // namespace
}  // namespace moeccl::testing
