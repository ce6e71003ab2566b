// SPDX-License-Identifier: Apache-2.0
// kill -9 of a random process rank at a random point of a running collective: every survivor returns an error that
// names it within 2 s, /dev/shm is unchanged, and no process is left. MOECCL_TEST_KILLS sets the number of kills
// (default 20; the full run is tools/fault-kill 200).
#include <dirent.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <random>
#include <set>
#include <thread>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kLimitMs = 2000;

std::set<std::string> list(const char* folder) {
  std::set<std::string> names;
  DIR* dir = opendir(folder);
  if (dir == nullptr) return names;
  while (const dirent* entry = readdir(dir)) names.insert(entry->d_name);
  closedir(dir);
  return names;
}

int kills() {
  const char* text = getenv("MOECCL_TEST_KILLS");
  return text != nullptr ? atoi(text) : scaled(20);
}

struct Plan {
  int n, victim, delay_us;
  size_t count;
  bool heap;
  moecclOp_t op;
};

Plan draw(uint64_t seed) {
  std::mt19937_64 random(seed);
  static constexpr int kSizes[] = {2, 3, 4, 8};
  static constexpr moecclOp_t kOps[] = {moecclOpAllReduce, moecclOpAllGather, moecclOpAllToAll, moecclOpBroadcast};
  const int n = kSizes[random() % 4];
  return {n,
          static_cast<int>(random() % static_cast<uint64_t>(n)),
          static_cast<int>(random() % 100'000),
          size_t{1} << (random() % 19),
          random() % 2 == 0,
          kOps[random() % 4]};
}

moecclResult_t call(const Plan& p, void* in, void* out, moecclComm_t comm) {
  switch (p.op) {
    case moecclOpAllGather:
      return moecclAllGather(in, out, p.count, moecclFloat32, comm, nullptr);
    case moecclOpAllToAll:
      return moecclAllToAll(in, out, p.count, moecclFloat32, comm, nullptr);
    case moecclOpBroadcast:
      return moecclBroadcast(in, out, p.count, moecclFloat32, 0, comm, nullptr);
    default:
      return moecclAllReduce(in, out, p.count, moecclFloat32, moecclSum, comm, nullptr);
  }
}

// Calls until a call fails, or on the victim until it dies.
void loop_until_failure(const Plan& p, int rank, moecclComm_t comm, const std::atomic<int64_t>& killed_ms,
                        std::atomic<int64_t>* slowest) {
  const size_t bytes = p.count * 4 * static_cast<size_t>(p.n);
  void* memory[2] = {malloc(bytes), malloc(bytes)};
  void* heap[2] = {nullptr, nullptr};
  for (int i = 0; i < 2 && p.heap; ++i) MOECCL_ASSERT_OK(moecclMemAlloc(&heap[i], bytes));
  moecclResult_t result = moecclSuccess;
  while (result == moecclSuccess && (killed_ms.load() == 0 || fair_now_ms() - killed_ms.load() < patient_ms(10'000))) {
    result = p.heap ? call(p, heap[0], heap[1], comm) : call(p, memory[0], memory[1], comm);
    // A broadcast's root waits for no other rank, so it asks for errors.
    if (result == moecclSuccess) {
      EXPECT_EQ(moecclCommGetAsyncError(comm, &result), moecclSuccess);
    }
  }
  const int64_t waited = fair_now_ms() - killed_ms.load();
  const std::string text = moecclGetLastError(comm);
  EXPECT_EQ(result, moecclRemoteError) << moecclGetErrorString(result) << ": " << text;
  EXPECT_NE(text.find("rank " + std::to_string(p.victim)), std::string::npos)
      << "rank " << p.victim << " died: " << text;
  EXPECT_LE(waited, patient_ms(kLimitMs)) << "rank " << rank << " noticed late";
  for (int64_t seen = slowest->load(); waited > seen && !slowest->compare_exchange_weak(seen, waited);) {
  }
  for (void* m : heap) EXPECT_EQ(moecclMemFree(m), moecclSuccess);
  for (void* m : memory) free(m);
}

struct Times {
  std::atomic<int64_t> killed_ms;
  std::atomic<int64_t> slowest_ms;
};

TEST(Kill, OfARankInACollectiveIsNamedByEverySurvivor) {
  const std::set<std::string> shm_before = list("/dev/shm");
  const int n_kills = kills();
  std::vector<int64_t> slowest;
  for (int i = 0; i < n_kills && !HasFailure(); ++i) {
    const Plan p = draw(test_seed() * 100'000 + static_cast<uint64_t>(i));
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", kill " << i << ": rank " << p.victim
                                      << " of " << p.n << " after " << p.delay_us << " us, operation " << p.op << " of "
                                      << p.count << " floats" << (p.heap ? " in the heap" : ""));
    Shared<Times> times;
    std::vector<pid_t> pids;
    const auto kill_victim = [&](const std::vector<pid_t>& pid_of_rank) {
      pids = pid_of_rank;
      std::this_thread::sleep_for(std::chrono::microseconds(p.delay_us));
      times->killed_ms = fair_now_ms();
      kill(pid_of_rank[static_cast<size_t>(p.victim)], SIGKILL);
    };
    run_ranks(
        p.n,
        [&](int rank, moecclComm_t comm) { loop_until_failure(p, rank, comm, times->killed_ms, &times->slowest_ms); },
        {.mode = RankMode::kProcesses, .deadline_ms = 30'000, .may_die = {p.victim}, .on_running = kill_victim});
    slowest.push_back(times->slowest_ms);
    for (pid_t pid : pids) EXPECT_NE(kill(pid, 0), 0) << "process " << pid << " is left";
  }
  // Other programs may come and go in the meantime, so wait for names that disappear again.
  const auto left_behind = [&] {
    std::set<std::string> names = list("/dev/shm");
    for (const std::string& name : shm_before) names.erase(name);
    std::erase_if(names,
                  [](const std::string& name) { return name.starts_with("sem.") || name.starts_with("vader_"); });
    return names;  // without semaphores of Python programs and segments of Open MPI
  };
  for (const Stopwatch watch; !left_behind().empty() && watch.ms() < 5000;)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(left_behind(), std::set<std::string>());
  if (slowest.empty()) return;
  std::sort(slowest.begin(), slowest.end());
  printf("%zu kills: slowest survivor p50 %ld ms, p99 %ld ms, max %ld ms (limit %d)\n", slowest.size(),
         static_cast<long>(slowest[slowest.size() / 2]), static_cast<long>(slowest[slowest.size() * 99 / 100]),
         static_cast<long>(slowest.back()), kLimitMs);
}

// Thread ranks die with their process. The error names all of them, or at least one.
TEST(Kill, OfAProcessWithSeveralRanksIsNoticedByTheOthers) {
  run_ranks(4,
            [](int rank, moecclComm_t comm) {
              if (rank % 2 == 1) {  // ranks 1 and 3 are one process
                std::this_thread::sleep_for(std::chrono::milliseconds(200));
                if (rank == 1) raise(SIGKILL);
              }
              float value = 1;
              moecclResult_t result = moecclSuccess;
              const Stopwatch watch;
              while (result == moecclSuccess && watch.fair_ms() < patient_ms(5000)) {
                result = moecclAllReduce(&value, &value, 1, moecclFloat32, moecclMax, comm, nullptr);
              }
              EXPECT_EQ(result, moecclRemoteError) << moecclGetLastError(comm);
              MOECCL_EXPECT_WITHIN(watch, 200 + kLimitMs);
              const std::string text = moecclGetLastError(comm);
              EXPECT_TRUE(text.find("rank 1") != std::string::npos || text.find("rank 3") != std::string::npos) << text;
            },
            {.mode = RankMode::kMixed, .may_die = {1, 3}});
}

// Rank 3 learns of the death on `other` and leaves `comm`, on which rank 2 waits: both ends are news to rank 2, and the
// death is the reason.
TEST(Kill, IsNotBlamedOnARankThatHeardOfItOnAnotherCommunicator) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {1, 1}, .named = true}, &why);
  ASSERT_NE(hosts, nullptr) << why;
  for (int i = 0; i < 2 * scaled(16) && !HasFailure(); ++i) {
    SCOPED_TRACE(i % 2 == 0 ? "on one host" : "between hosts");
    RankOptions options{.mode = RankMode::kProcesses, .destroy = false, .may_die = {1}};
    options.hosts = i % 2 == 0 ? nullptr : hosts.get();
    Meeting ready;
    run_ranks(
        4,
        [&](int rank, moecclComm_t comm) {
          moecclComm_t other = nullptr;
          MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &other, nullptr), comm);
          float value = 1;
          const auto sum = [&](moecclComm_t c) {
            return moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, c, nullptr);
          };
          EXPECT_TRUE(ready.meet(4));
          if (rank == 1) {
            usleep(static_cast<useconds_t>(20'000 + 1000 * i));  // the others wait, and look at each other in turn
            raise(SIGKILL);
          }
          moecclComm_t awaited = rank == 2 ? comm : other;
          EXPECT_EQ(sum(awaited), moecclRemoteError);
          const std::string text = moecclGetLastError(awaited);
          EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          MOECCL_EXPECT_OK(moecclCommDestroy(other));
        },
        options);
  }
}

TEST(Kill, DuringInitIsNamedByTheOthers) {
  run_ranks(3,
            [](int rank, moecclComm_t) {
              if (rank == 2) raise(SIGKILL);
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.init_timeout_ms = 1500;
              moecclComm_t comm = nullptr;
              const Stopwatch watch;
              const moecclResult_t result = moecclCommInitRankConfig(&comm, 3, unique_id(), rank, &config);
              EXPECT_TRUE(result == moecclTimeout || result == moecclRemoteError) << moecclGetErrorString(result);
              MOECCL_EXPECT_WITHIN(watch, 1500 + 1000);
              const std::string text = moecclGetLastError(nullptr);
              EXPECT_NE(text.find("2"), std::string::npos) << "the missing rank is not named: " << text;
            },
            {.mode = RankMode::kProcesses, .init = false, .may_die = {2}});
}

}  // namespace
}  // namespace moeccl::testing
