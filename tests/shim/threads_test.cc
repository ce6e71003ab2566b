// SPDX-License-Identifier: Apache-2.0
// The program's threads in the shim, which may be cancelled, and the shim's own, which leave signals to the program's.
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

// Rank 0 of two communicators, which a group joins.
struct Waiter {
  ncclUniqueId ids[2]{};
  ncclComm_t comms[2] = {};
  std::atomic<pid_t> tid{0};
  std::atomic<bool> ended{false}, went_on{false};

  Waiter() {
    for (ncclUniqueId& id : ids) EXPECT_NCCL(ncclGetUniqueId(&id));
  }
  void join(int rank, ncclComm_t* made) {
    EXPECT_NCCL(ncclGroupStart());
    for (int i = 0; i < 2; ++i) EXPECT_NCCL(ncclCommInitRank(&made[i], 2, ids[i], rank));
    EXPECT_NCCL(ncclGroupEnd());
  }
  static void* run(void* given) {
    auto& w = *static_cast<Waiter*>(given);
    w.tid = static_cast<pid_t>(syscall(SYS_gettid));
    w.join(0, w.comms);
    w.ended = true;
    pthread_testcancel();
    w.went_on = true;
    return nullptr;
  }
};

// Returns how many threads other than these two there are, and how many of them take SIGTERM or SIGUSR1.
struct Threads {
  int others = 0, with_signals = 0;
};
Threads threads_besides(pid_t first, pid_t second) {
  Threads found;
  std::error_code gone;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    const int tid = std::atoi(task.path().filename().c_str());
    std::ifstream status(task.path() / "status");
    for (std::string line; tid != first && tid != second && std::getline(status, line);) {
      if (!line.starts_with("SigBlk:")) continue;
      const auto blocked = std::strtoull(line.c_str() + 7, nullptr, 16);
      const auto has = [blocked](int signal) { return (blocked >> (signal - 1) & 1) != 0; };
      ++found.others;
      found.with_signals += has(SIGTERM) && has(SIGUSR1) ? 0 : 1;
    }
  }
  return found;
}

TEST(ShimThreads, ACancelledThreadEndsItsGroupFirst) {
  in_processes(1, [](int) {
    Waiter w;
    pthread_t thread;
    ASSERT_EQ(pthread_create(&thread, nullptr, Waiter::run, &w), 0);
    usleep(300'000);  // until it waits for the threads that join
    EXPECT_EQ(pthread_cancel(thread), 0);
    usleep(200'000);
    EXPECT_FALSE(w.ended);
    ncclComm_t comms[2] = {};
    w.join(1, comms);
    void* result = nullptr;
    EXPECT_EQ(pthread_join(thread, &result), 0);
    EXPECT_EQ(result, PTHREAD_CANCELED);
    EXPECT_TRUE(w.ended);
    EXPECT_FALSE(w.went_on);
    for (const ncclComm_t* made : {w.comms, comms})
      for (int i = 0; i < 2; ++i) EXPECT_NCCL(ncclCommDestroy(made[i]));
  });
}

TEST(ShimThreads, ThoseThatJoinForAGroupTakeNoSignals) {
  in_processes(1, [](int) {
    Waiter w;
    std::thread thread([&] { Waiter::run(&w); });
    while (w.tid == 0) usleep(1000);
    Threads now;
    while ((now = threads_besides(getpid(), w.tid)).others < 4) usleep(1000);  // two that join, and two meeting points
    EXPECT_EQ(now.with_signals, 0);
    ncclComm_t comms[2] = {};
    w.join(1, comms);
    thread.join();
  });
}

TEST(ShimThreads, OneThatJoinsInTheBackgroundTakesNoSignals) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclInProgress);
    Threads now;
    while ((now = threads_besides(getpid(), 0)).others < 2) usleep(1000);  // and the meeting point
    EXPECT_EQ(now.with_signals, 0);
    EXPECT_NCCL(ncclCommAbort(comm));
  });
}

}  // namespace
}  // namespace moeccl::testing
