// SPDX-License-Identifier: Apache-2.0
// Ranks for tests: threads of one process, processes, or both at once. The test process itself never touches the
// library. Even thread ranks live in a forked child, so every call of run_ranks starts from a clean process, a crash or
// a kill is a failure with a rank's name on it, and nothing can hang the test (a hard deadline kills what is left).
//
//   run_ranks(4, [](int rank, moecclComm_t comm) {
//     ASSERT_EQ(moecclAllReduce(...), moecclSuccess) << moecclGetLastError(comm);
//   }, {.mode = RankMode::kProcesses});
//
// EXPECT and ASSERT work inside: the test reports failures, with the rank. Other results must go through Shared.
#pragma once

#include <sys/mman.h>
#include <sys/types.h>

#include <atomic>
#include <functional>
#include <new>
#include <ostream>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/timing.h"

namespace moeccl::testing {

using tests::capped_ms;
using tests::fair_now_ms;
using tests::free_port;
using tests::now_ms;
using tests::patient_ms;
using tests::sanitized;
using tests::Stopwatch;

enum class RankMode {
  kThreads,    // all ranks are threads of one process
  kProcesses,  // one process per rank
  kMixed,      // (n+1)/2 processes, rank r in process r % that many
};
const char* mode_name(RankMode mode);
inline std::ostream& operator<<(std::ostream& out, RankMode mode) { return out << mode_name(mode); }

struct RankOptions {
  RankMode mode = RankMode::kThreads;
  moecclConfig_t config =
      MOECCL_CONFIG_INIT;            // timeouts of 0 become 20 s here (patient_ms), so that the library finds a hang
  int deadline_ms = 60'000;          // for everything (patient_ms); ranks that are left then are killed and reported
  bool init = true;                  // false: fn gets a null comm and may join with unique_id() itself
  bool destroy = true;               // false: fn destroys its communicator itself
  bool check_leaks = true;           // under LeakSanitizer, at the end of each process
  class TestHosts* hosts = nullptr;  // where the processes run; null: all here, or as MOECCL_TEST_HOSTS says
  std::set<int> may_die = {};        // ranks whose process may be killed; their threads need not report
  // Called in the test's process once all communicators exist and before any fn starts (when init is true).
  std::function<void(const std::vector<pid_t>& pid_of_rank)> on_ready = {};
  // Called in the test's process when all fn have been released, and runs concurrently with them. Kill ranks from here.
  std::function<void(const std::vector<pid_t>& pid_of_rank)> on_running = {};
};

using RankFunction = std::function<void(int rank, moecclComm_t comm)>;

// Runs fn as n ranks. Returns true when every rank ended without a failed expectation. Failures are already reported.
bool run_ranks(int n, const RankFunction& fn, const RankOptions& options = {});

// Inside fn: returns the id under which these ranks meet (a different one for each call of run_ranks).
moecclUniqueId unique_id();
// Inside fn: sets what this rank is doing, for the report when it hangs or dies. At most 200 bytes are kept.
void set_note(const std::string& note);

// Scales numbers of repetitions, and nothing else: MOECCL_TEST_SCALE, 1 by default, 0.1 under sanitizers.
double test_scale();
int scaled(int n);  // at least 1
// Returns MOECCL_TEST_SEED, or 1 so that a test's result does not depend on luck; "random" takes one from the clock. It
// is printed once, so that the run can be replayed.
uint64_t test_seed();

// One T that the test and all its ranks share. Make it before run_ranks.
template <class T>
class Shared {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  Shared() : value_(new (mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) T()) {}
  ~Shared() { munmap(value_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;
  T* operator->() const { return value_; }
  T& operator*() const { return *value_; }

 private:
  T* value_;
};

// Lets the ranks of a test wait for one another without the library. Make it before run_ranks.
class Meeting {
 public:
  void arrive() { here_->fetch_add(1); }
  // Waits until n arrivals have happened. Returns false after a generous time, so that a rank that failed does not hang
  // the others.
  bool wait_for(int n) const;
  // Does both, for a meeting of n ranks in which each takes part once.
  bool meet(int n) {
    arrive();
    return wait_for(n);
  }

 private:
  Shared<std::atomic<int>> here_;
};

}  // namespace moeccl::testing

// Inside fn: expects that the call succeeded, and shows the rank's error sentence otherwise.
#define MOECCL_EXPECT_OK(expr) EXPECT_EQ((expr), moecclSuccess) << moecclGetLastError(nullptr)
#define MOECCL_ASSERT_OK(expr) ASSERT_EQ((expr), moecclSuccess) << moecclGetLastError(nullptr)
#define MOECCL_EXPECT_COMM_OK(expr, comm) EXPECT_EQ((expr), moecclSuccess) << moecclGetLastError(comm)
#define MOECCL_ASSERT_COMM_OK(expr, comm) ASSERT_EQ((expr), moecclSuccess) << moecclGetLastError(comm)
