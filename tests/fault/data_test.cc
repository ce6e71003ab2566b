// SPDX-License-Identifier: Apache-2.0
// After a fault, no wrong data is reported as success, and no data is written late. Ranks run random operations on
// predictable data until a fault ends them: one rank is killed, stopped and continued, or aborts, or its connections
// are cut. Every operation that returned success must hold the right data, memory that a failed call has returned must
// stay as its owner fills it, and every rank must learn in time which rank to look at (scoreboard lines 3, 5, 6 and 8).
// MOECCL_TEST_FAULTS sets the number of faults of each kind.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "tests/fault/feature_worker.h"
#include "tests/fault/random_worker.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

enum class Kind { kKill, kStop, kAbort, kExec, kBlackHole, kReset };
enum class Where { kOneHost, kNamedHosts, kNamespaces };

struct Fault {
  Kind kind = Kind::kKill;
  Where where = Where::kOneHost;
  Operations operations = {};
  int victim = 0, delay_us = 0;
  bool features = false;
  bool one_way = false;  // a black hole
};

constexpr int kTimeoutMs = 700;  // of stops and black holes, which only a timeout reveals

// The most time between the fault and a rank's error.
int limit_ms(Kind kind) {
  if (kind == Kind::kStop || kind == Kind::kBlackHole) return kTimeoutMs + 1000;
  return kind == Kind::kReset || kind == Kind::kAbort ? 1000 : 2000;
}

struct Progress {
  std::atomic<int> ready;         // ranks that have what they need
  std::atomic<int64_t> event_ms;  // 0: not yet
  std::atomic<int> failed;        // ranks whose loop has ended
  std::atomic<int> over;          // nonzero once the stopped rank has been continued
  std::atomic<uint64_t> checked;  // operations that returned success, over all ranks
};

void sleep_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

void await_time(const Fault& fault, const Progress& shared) {
  for (const Stopwatch watch; shared.ready < fault.operations.n && watch.fair_ms() < patient_ms(10'000);) sleep_us(100);
  sleep_us(fault.delay_us);
}

// Expects that a rank's error came in time and names a rank that is to blame: the victim or, if the network has failed,
// one of the other host.
void check_failure(const Fault& fault, int rank, int64_t waited_ms, const std::string& text) {
  const bool network = fault.kind == Kind::kBlackHole || fault.kind == Kind::kReset;
  if (!network && rank == fault.victim) {
    // A stopped rank goes on when the others have failed.
    EXPECT_LE(waited_ms, fault.kind == Kind::kStop ? patient_ms(20'000) : patient_ms(limit_ms(fault.kind)));
    return;
  }
  EXPECT_LE(waited_ms, patient_ms(limit_ms(fault.kind))) << "rank " << rank << ": " << text;
  bool named = false;
  for (int r = 0; r < fault.operations.n; ++r) {
    const bool to_blame = network ? (r < fault.operations.n / 2) != (rank < fault.operations.n / 2) : r == fault.victim;
    named = named || (to_blame && text.find("rank " + std::to_string(r)) != std::string::npos);
  }
  // A message that times out can name only its own peer, which may be alive and wait for the stopped rank in turn.
  if (fault.kind == Kind::kStop) named = named || text.find(" moved) did not finish") != std::string::npos;
  EXPECT_TRUE(named) << "rank " << rank << " names none that is to blame: " << text;
}

template <class W>
void run_rank(const Fault& fault, int rank, moecclComm_t comm, Progress& shared) {
  W worker(fault.operations, rank, comm);
  shared.ready++;
  std::thread ender;
  if (fault.kind == Kind::kAbort && rank == fault.victim) {
    ender = std::thread([&] {
      await_time(fault, shared);
      shared.event_ms = fair_now_ms();
      EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
    });
  }
  if (fault.kind == Kind::kExec && rank == fault.victim) {
    ender = std::thread([&] {
      await_time(fault, shared);
      shared.event_ms = fair_now_ms();
      execl("/bin/sleep", "sleep", "3", static_cast<char*>(nullptr));
    });
  }
  moecclResult_t result = moecclSuccess;
  uint64_t it = 0;
  // A rank whose operations wait for no other rank, such as the root of broadcasts, learns of the failure with its next
  // question.
  while (result == moecclSuccess && (shared.event_ms == 0 || fair_now_ms() - shared.event_ms < patient_ms(10'000))) {
    result = worker.step(++it);
    if (result == moecclSuccess && it % 16 == 0) {
      EXPECT_EQ(moecclCommGetAsyncError(comm, &result), moecclSuccess);
    }
  }
  const int64_t waited_ms = fair_now_ms() - shared.event_ms;
  const std::string of_thread = moecclGetLastError(nullptr);  // such as of an expert swap, which has a communicator
  const std::string text = moecclGetLastError(comm) + ("; " + of_thread);
  worker.take_back();
  shared.failed++;
  check_failure(fault, rank, waited_ms, text);
  EXPECT_NE(result, moecclSuccess) << "no failure on rank " << rank;
  EXPECT_EQ(worker.wrong(), 0u) << "rank " << rank << ": success with wrong data in " << worker.what()
                                << "; the loop ended with: " << text;
  shared.checked += it - 1;
  for (const Stopwatch watch; shared.over == 0 && watch.fair_ms() < patient_ms(20'000);) sleep_us(1000);
  sleep_us(100'000);
  EXPECT_EQ(worker.bytes_written_late(), 0u) << "rank " << rank << " after " << worker.name() << ": " << text;
  if (ender.joinable()) ender.join();
}

const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {"kill", "stop", "abort", "exec", "black hole", "reset"};
  return kNames[static_cast<int>(kind)];
}

void cause(const Fault& fault, const std::vector<pid_t>& pids, const TestHosts* hosts, Progress& shared) {
  const pid_t victim = pids[static_cast<size_t>(fault.victim)];
  const bool by_rank = fault.kind == Kind::kAbort || fault.kind == Kind::kExec;
  const bool goes = fault.kind == Kind::kKill || fault.kind == Kind::kStop || fault.kind == Kind::kExec;
  const int others = fault.operations.n - (goes ? 1 : 0);
  if (!by_rank) await_time(fault, shared);
  if (fault.kind == Kind::kKill) kill(victim, SIGKILL);
  if (fault.kind == Kind::kStop) kill(victim, SIGSTOP);
  if (fault.kind == Kind::kBlackHole) {
    EXPECT_TRUE(fault.one_way ? hosts->drop_what_it_sends(1) : hosts->pull_cable(1));
  }
  if (fault.kind == Kind::kReset) {
    EXPECT_TRUE(hosts->run(fault.victim % 2, "ss -K -t state established >/dev/null"));
  }
  if (!by_rank) shared.event_ms = fair_now_ms();
  const int64_t until_ms = patient_ms(20'000) + (by_rank ? fault.delay_us / 1000 : 0);
  for (const Stopwatch watch; shared.failed < others && watch.fair_ms() < until_ms;) sleep_us(500);
  EXPECT_GE(shared.failed.load(), others) << "ranks that have not ended 20 s after the fault";
  if (fault.kind == Kind::kStop) {
    kill(victim, SIGCONT);
    for (const Stopwatch watch; shared.failed < fault.operations.n && watch.fair_ms() < patient_ms(10'000);)
      sleep_us(500);
  }
  shared.over = 1;
  if (fault.kind == Kind::kExec) kill(victim, SIGKILL);
}

int faults(int usual) {
  const char* text = getenv("MOECCL_TEST_FAULTS");
  return text != nullptr ? atoi(text) : scaled(usual);
}

// Returns the range of each fault's time: the first 60 ms, or the seconds of MOECCL_TEST_FAULT_WITHIN_S.
uint64_t within_us() {
  const char* text = getenv("MOECCL_TEST_FAULT_WITHIN_S");
  return text != nullptr ? static_cast<uint64_t>(atoi(text)) * 1'000'000 + 1 : 60'000;
}

constexpr int kFeatures = -2, kGathers = -3, kAllGather = 3, kReduceScatter = 4, kAllToAll = 5, kGather = 7;

// `only`: run only one operation, in which copies take most of the time; kGathers: each of these in turn; kFeatures:
// the steps of FeatureWorker.
void run_faults(Kind kind, Where where, bool heap, int usual, int only = -1) {
  std::unique_ptr<TestHosts> hosts;
  if (where != Where::kOneHost) {
    std::string why;
    hosts = TestHosts::create({.weights = {1, 1}, .named = where == Where::kNamedHosts}, &why);
    if (hosts == nullptr) GTEST_SKIP() << why;
  }
  uint64_t checked = 0;
  const int n_faults = faults(usual);
  for (int i = 0; i < n_faults && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 100'000 + static_cast<uint64_t>(i));
    Fault fault{kind, where};
    fault.features = only == kFeatures;
    fault.operations.n = where == Where::kOneHost && !fault.features ? 2 + static_cast<int>(random() % 3) : 4;
    fault.victim = static_cast<int>(random() % static_cast<uint64_t>(fault.operations.n));
    fault.one_way = i % 2 == 0;
    fault.delay_us = static_cast<int>(random() % (fault.features ? 3 * within_us() : within_us()));  // steps are longer
    fault.operations.heap = heap;
    fault.operations.seed = random();
    constexpr int kInTurn[] = {kGather, kAllGather, kReduceScatter, kAllToAll};
    fault.operations.op = only == kGathers ? kInTurn[i % 4] : only;
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", " << name_of(kind) << " " << i
                                      << " of rank " << fault.victim << " of " << fault.operations.n << " after "
                                      << fault.delay_us << " us");
    Shared<Progress> shared;
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 60'000 + fault.delay_us / 1000};
    options.hosts = hosts.get();
    if (fault.features) options.config.topology = FeatureWorker::kTopology;
    if (kind == Kind::kStop || kind == Kind::kBlackHole)
      options.config.timeout_ms = static_cast<int32_t>(patient_ms(kTimeoutMs));
    if (kind == Kind::kKill || kind == Kind::kExec) options.may_die = {fault.victim};
    options.on_running = [&](const std::vector<pid_t>& pids) { cause(fault, pids, hosts.get(), *shared); };
    run_ranks(
        fault.operations.n,
        [&](int rank, moecclComm_t comm) {
          (fault.features ? run_rank<FeatureWorker> : run_rank<Worker>)(fault, rank, comm, *shared);
        },
        options);
    if (kind == Kind::kBlackHole) {
      EXPECT_TRUE(hosts->repair(1));
    }
    checked += shared->checked;
  }
  printf("%d faults (%s): %llu operations returned success, all with the right data\n", n_faults, name_of(kind),
         static_cast<unsigned long long>(checked));
}

TEST(FaultData, KillOnOneHost) { run_faults(Kind::kKill, Where::kOneHost, false, 6); }
TEST(FaultData, KillInTheHeap) { run_faults(Kind::kKill, Where::kOneHost, true, 6); }
TEST(FaultData, KillBetweenHosts) { run_faults(Kind::kKill, Where::kNamedHosts, false, 6); }
TEST(FaultData, StopOnOneHost) { run_faults(Kind::kStop, Where::kOneHost, false, 3); }
TEST(FaultData, StopInTheHeap) { run_faults(Kind::kStop, Where::kOneHost, true, 3); }
TEST(FaultData, StopInTheHeapOfGathers) { run_faults(Kind::kStop, Where::kOneHost, true, 4, kGathers); }
TEST(FaultData, StopBetweenHosts) { run_faults(Kind::kStop, Where::kNamedHosts, false, 3); }
TEST(FaultData, ExecOnOneHost) { run_faults(Kind::kExec, Where::kOneHost, false, 3); }
TEST(FaultData, ExecInTheHeap) { run_faults(Kind::kExec, Where::kOneHost, true, 3); }
TEST(FaultData, ExecBetweenHosts) { run_faults(Kind::kExec, Where::kNamedHosts, false, 3); }
TEST(FaultData, AbortOnOneHost) { run_faults(Kind::kAbort, Where::kOneHost, false, 6); }
TEST(FaultData, AbortInTheHeap) { run_faults(Kind::kAbort, Where::kOneHost, true, 6); }
TEST(FaultData, AbortInTheHeapOfAllGathers) { run_faults(Kind::kAbort, Where::kOneHost, true, 6, kAllGather); }
TEST(FaultData, AbortBetweenHosts) { run_faults(Kind::kAbort, Where::kNamedHosts, false, 6); }
TEST(FaultData, BlackHoleBetweenHosts) { run_faults(Kind::kBlackHole, Where::kNamespaces, false, 8); }
TEST(FaultData, ResetBetweenHosts) { run_faults(Kind::kReset, Where::kNamespaces, false, 4); }
TEST(FaultData, FeaturesKilledOnOneHost) { run_faults(Kind::kKill, Where::kOneHost, false, 4, kFeatures); }
TEST(FaultData, FeaturesKilledBetweenHosts) { run_faults(Kind::kKill, Where::kNamedHosts, false, 4, kFeatures); }
TEST(FaultData, FeaturesStoppedOnOneHost) { run_faults(Kind::kStop, Where::kOneHost, false, 4, kFeatures); }
TEST(FaultData, FeaturesStoppedBetweenHosts) { run_faults(Kind::kStop, Where::kNamedHosts, false, 4, kFeatures); }
TEST(FaultData, FeaturesAbortedOnOneHost) { run_faults(Kind::kAbort, Where::kOneHost, false, 4, kFeatures); }
TEST(FaultData, FeaturesAbortedBetweenHosts) { run_faults(Kind::kAbort, Where::kNamedHosts, false, 4, kFeatures); }

}  // namespace
}  // namespace moeccl::testing
