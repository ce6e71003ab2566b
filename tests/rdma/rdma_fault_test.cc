// SPDX-License-Identifier: Apache-2.0
// A rank is killed, a cable is pulled, a rank freezes or its queue pair goes to the error state in the middle of
// operations between two hosts. Every survivor returns an error that names a culprit within the communicator's timeout
// plus 2 s, and nothing is left behind: no process, shared memory, queue pair, region or completion queue. Runs in
// tools/rdma-vm's machine, over the network that MOECCL_NET names.
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kTimeoutMs = 1000, kLongTimeoutMs = 30'000;
constexpr int kSlackMs = 2000;

int processes_like_this() {
  const auto name_of = [](const std::string& pid) {
    std::string name;
    std::ifstream("/proc/" + pid + "/comm") >> name;
    return name;
  };
  const std::string name = name_of("self");
  int n = 0;
  DIR* processes = opendir("/proc");
  if (processes == nullptr) return -1;
  while (const dirent* entry = readdir(processes))
    n += isdigit(static_cast<unsigned char>(entry->d_name[0])) != 0 && name_of(entry->d_name) == name;
  closedir(processes);
  return n;
}

// Lists what a rank can leave behind: shared memory, RDMA objects and processes of this test.
std::string leftovers() {
  std::string text;
  DIR* shared = opendir("/dev/shm");
  if (shared == nullptr) return "no /dev/shm";
  std::set<std::string> names;
  while (const dirent* entry = readdir(shared)) names.insert(entry->d_name);
  closedir(shared);
  for (const std::string& name : names) text += name + " ";
  text += std::to_string(processes_like_this()) + " processes\n";
  FILE* pipe = popen("rdma resource show 2>&1", "r");
  if (pipe == nullptr) return "no shell";
  std::array<char, 512> line;
  while (fgets(line.data(), line.size(), pipe) != nullptr) text += line.data();
  pclose(pipe);
  return text;
}

struct Outcome {
  std::atomic<int64_t> event_ms, latest_ms;
  std::atomic<int> ended;
};

enum class Fault { kKill, kCable, kRdmaCable, kFreeze, kQueuePair };

// One draw: n ranks on two hosts, what they call, which rank fails and when.
struct Trial {
  Fault fault = Fault::kKill;
  int n = 2, victim = 0, delay_us = 0;
  moecclOp_t op = moecclOpAllReduce;
  size_t count = 1;
  int timeout_ms = kTimeoutMs;
  // In which survivors return: what ends is noticed long before a long timeout.
  int64_t most_ms() const { return (timeout_ms == kTimeoutMs ? kTimeoutMs : 0) + patient_ms(kSlackMs); }
  bool on_host_of_victim(int rank) const { return rank * 2 / n == victim * 2 / n; }
  // The ranks that may be blamed: the victim, or the ranks beyond a pulled cable or a broken queue pair. A rank that
  // waits only for its own host is told by others, and they name some rank beyond the cable.
  bool culprit(int rank, int by) const {
    if (fault == Fault::kKill || fault == Fault::kFreeze) return rank == victim;
    return rank * 2 / n != by * 2 / n;
  }
};

Trial draw(Fault fault, uint64_t seed) {
  std::mt19937_64 random(seed);
  static constexpr moecclOp_t kOps[] = {moecclOpAllReduce, moecclOpAllGather, moecclOpAllToAll};
  Trial t{.fault = fault, .n = random() % 5 == 0 ? 4 : 2};
  t.victim = static_cast<int>(random() % static_cast<uint64_t>(t.n));
  t.delay_us = static_cast<int>(random() % 100'000);
  t.op = kOps[random() % 3];
  t.count = size_t{1} << (random() % 18);
  return t;
}

moecclResult_t call(const Trial& t, const std::vector<float>& in, std::vector<float>& out, moecclComm_t comm) {
  switch (t.op) {
    case moecclOpAllGather:
      return moecclAllGather(in.data(), out.data(), t.count, moecclFloat32, comm, nullptr);
    case moecclOpAllToAll:
      return moecclAllToAll(in.data(), out.data(), t.count, moecclFloat32, comm, nullptr);
    default:
      return moecclAllReduce(in.data(), out.data(), t.count, moecclFloat32, moecclSum, comm, nullptr);
  }
}

void survive(const Trial& t, int rank, moecclComm_t comm, Outcome& outcome) {
  const std::vector<float> in(t.count * static_cast<size_t>(t.n), 1);
  std::vector<float> out(in.size());
  moecclResult_t result = moecclSuccess;
  const int64_t start = now_ms();
  while (result == moecclSuccess && now_ms() - start < patient_ms(20'000)) result = call(t, in, out, comm);
  const int64_t end = fair_now_ms();
  const std::string said = moecclGetLastError(comm);
  ASSERT_NE(result, moecclSuccess);
  bool named = false;
  for (int r = 0; r < t.n; ++r) {
    named = named || (t.culprit(r, rank) && said.find("rank " + std::to_string(r)) != std::string::npos);
  }
  EXPECT_TRUE(named) << said;
  const int64_t event = outcome.event_ms.load();
  EXPECT_GT(event, 0) << "it failed before anything had happened: " << said;
  int64_t latest = outcome.latest_ms.load();
  while (latest < end && !outcome.latest_ms.compare_exchange_weak(latest, end)) {
  }
  ++outcome.ended;
}

void strike(const Trial& t, const TestHosts& hosts, pid_t victim, Outcome& outcome) {
  usleep(static_cast<useconds_t>(t.delay_us));
  outcome.event_ms = fair_now_ms();
  const int host = t.victim * 2 / t.n;
  switch (t.fault) {
    case Fault::kKill:
      kill(victim, SIGKILL);
      break;
    case Fault::kCable:
      EXPECT_TRUE(hosts.pull_cable(host));
      break;
    case Fault::kRdmaCable:
      EXPECT_TRUE(hosts.pull_rdma_cable(host));
      break;
    case Fault::kQueuePair:
      kill(victim, SIGUSR2);  // see breaking_ibverbs.cc
      break;
    case Fault::kFreeze:
      kill(victim, SIGSTOP);
      // The victim stays frozen until no rank waits for it. Then it goes, and its own memory with it.
      for (int64_t began = now_ms(); outcome.ended < t.n - 1 && now_ms() - began < patient_ms(20'000);) usleep(5'000);
      kill(victim, SIGKILL);
      break;
  }
}

// Returns the milliseconds from the event to the return of the last rank.
int64_t run_trial(const Trial& t, const std::string& before) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {1, 1}}, &why);
  EXPECT_NE(hosts, nullptr) << why;
  if (hosts == nullptr) return 0;
  const Shared<Outcome> outcome;
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = hosts.get();
  options.config.timeout_ms = t.timeout_ms;
  options.check_leaks = false;
  const bool dies = t.fault == Fault::kKill || t.fault == Fault::kFreeze;
  if (dies) options.may_die = {t.victim};
  options.on_running = [&](const std::vector<pid_t>& pids) {
    strike(t, *hosts, pids[static_cast<size_t>(t.victim)], *outcome);
    // A shell takes seconds to pull a cable while ranks poll, so the event counts from the end of the pull.
    if (!dies) outcome->event_ms = fair_now_ms();
  };
  run_ranks(
      t.n,
      [&](int rank, moecclComm_t comm) {
        survive(t, rank, comm, *outcome);
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
      },
      options);
  EXPECT_LE(outcome->latest_ms - outcome->event_ms, t.most_ms());
  EXPECT_EQ(outcome->ended, dies ? t.n - 1 : t.n);
  std::string after = leftovers();
  for (int i = 0; i < 20 && after != before; ++i) usleep(100'000), after = leftovers();
  EXPECT_EQ(after, before) << "left behind";
  return outcome->latest_ms - outcome->event_ms;
}

void run_trials(int n, Fault first, Fault second, int timeout_ms = kTimeoutMs) {
  int64_t longest = 0;
  fair_now_ms();  // starts its own process at the first call, before leftovers() counts processes
  const std::string before = leftovers();
  for (int i = 0; i < n; ++i) {
    Trial t = draw(i % 2 == 0 ? first : second, test_seed() * 1000 + static_cast<uint64_t>(i));
    t.timeout_ms = timeout_ms;
    SCOPED_TRACE(::testing::Message() << "trial " << i << ": " << t.n << " ranks, victim " << t.victim << ", op "
                                      << t.op << ", " << t.count << " elements");
    longest = std::max(longest, run_trial(t, before));
    if (::testing::Test::HasFailure()) return;
  }
  printf("[          ] %d trials (%s): the last rank returned at most %lld ms after the event, timeout %d ms\n", n,
         ::testing::UnitTest::GetInstance()->current_test_info()->name(), static_cast<long long>(longest), timeout_ms);
}

bool over_rdma() {
  const char* net = getenv("MOECCL_NET");
  return net != nullptr && std::string(net) == "verbs";
}

TEST(RdmaFault, ARankIsKilled) { run_trials(scaled(50), Fault::kKill, Fault::kKill); }

// Not by its NIC, which with 7 retries never fails on rdma_rxe, and takes half a minute elsewhere.
TEST(RdmaFault, AKilledRankIsNamedLongBeforeTheTimeout) {
  run_trials(std::max(3, scaled(20)), Fault::kKill, Fault::kKill, kLongTimeoutMs);
}

// Pulls the cable of the data network alone, then those of all networks: a different part notices that the peer is
// gone.
TEST(RdmaFault, ACableIsPulled) {
  run_trials(std::max(2, scaled(10)), Fault::kCable, over_rdma() ? Fault::kRdmaCable : Fault::kCable);
}

// Its NIC has no way to the peer any more; the peer's NIC gets no answers.
TEST(RdmaFault, AQueuePairBreaks) {
  if (!over_rdma()) GTEST_SKIP() << "only over RDMA";
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe");
  setenv("MOECCL_IB_LIBRARY", (self.parent_path() / "libbreaking_ibverbs.so").c_str(), 1);  // read by each rank
  run_trials(scaled(25), Fault::kQueuePair, Fault::kQueuePair);
  unsetenv("MOECCL_IB_LIBRARY");
}

// A rank does without the port at which others find out whether it lives, but not without the one for a shrink.
TEST(RdmaPorts, TheOneThatIsNeededIsTakenFirst) {
  std::string why;
  const auto hosts = TestHosts::create({}, &why);
  ASSERT_NE(hosts, nullptr) << why;
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = hosts.get();
  setenv("MOECCL_PORT_RANGE", "31000-31000", 1);  // read by each rank
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        int32_t in = 1, out = 0;
        MOECCL_EXPECT_COMM_OK(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, comm, nullptr), comm);
        EXPECT_EQ(out, 2) << "rank " << rank;
      },
      options);
  unsetenv("MOECCL_PORT_RANGE");
}

TEST(RdmaFault, ARankFreezes) { run_trials(scaled(5), Fault::kFreeze, Fault::kFreeze); }

}  // namespace
}  // namespace moeccl::testing
