// SPDX-License-Identifier: Apache-2.0
// Ranks of an ordinary NCCL program, for tests that run under the preloaded shim: processes, or threads of one process.
// The test process itself never calls NCCL; all NCCL code runs in a forked child under an alarm.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "shim/nccl/abi.h"

namespace moeccl::testing {

// Shared by the processes of one test.
struct Board {
  ncclUniqueId id{};
  std::atomic<int> id_ready{0};
  std::atomic<int> counters[8] = {};
};

// A number from the environment, such as MOECCL_TEST_SCALE for repetitions and MOECCL_TEST_PATIENCE for time limits.
inline double setting(const char* name) {
  const char* text = std::getenv(name);
  return text != nullptr && std::atof(text) > 0 ? std::atof(text) : 1;
}

inline double seconds_since(std::chrono::steady_clock::time_point begun) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}
inline double patient(double limit) { return limit * setting("MOECCL_TEST_PATIENCE"); }

inline Board* new_board() {
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) Board();
}

// Rank 0 makes the id, and the others wait for it. Programs may pass it on in any way.
inline ncclUniqueId meet(Board& board, int rank) {
  if (rank == 0) {
    EXPECT_EQ(ncclGetUniqueId(&board.id), ncclSuccess) << ncclGetLastError(nullptr);
    board.id_ready.store(1);
  }
  while (board.id_ready.load() == 0) usleep(1000);
  return board.id;
}

// Runs work in n forked processes and checks that each ended well. Ranks in `killed` may end as they like.
inline void in_processes(int n, const std::function<void(int rank)>& work, std::vector<int> killed = {}) {
  std::vector<pid_t> children;
  for (int r = 0; r < n; ++r) {
    const pid_t pid = fork();
    ASSERT_GE(pid, 0);
    if (pid == 0) {
      alarm(static_cast<unsigned>(patient(100)));  // no rank outlives a hang
      work(r);
      fflush(nullptr);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    children.push_back(pid);
  }
  for (int r = 0; r < n; ++r) {
    int status = 0;
    waitpid(children[static_cast<size_t>(r)], &status, 0);
    bool may_die = false;
    for (const int k : killed) may_die |= k == r;
    EXPECT_TRUE(may_die || (WIFEXITED(status) && WEXITSTATUS(status) == 0))
        << "rank " << r << " ended with wait status " << status << " (its output is above)";
  }
}

// Runs n threads in one forked process, like a program that drives several devices.
inline void in_threads(int n, const std::function<void(int rank)>& work) {
  in_processes(1, [&](int) {
    std::vector<std::thread> threads;
    for (int r = 0; r < n; ++r) threads.emplace_back([&, r] { work(r); });
    for (std::thread& t : threads) t.join();
  });
}

// Returns the state of a nonblocking communicator once it is no longer in progress.
inline ncclResult_t wait_ready(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  while (state == ncclInProgress) {
    EXPECT_EQ(ncclCommGetAsyncError(comm, &state), ncclSuccess) << ncclGetLastError(nullptr);
    usleep(100);
  }
  return state;
}

// Makes a nonblocking communicator, whose splits and shrinks run in the background.
inline ncclComm_t nonblocking(int n_ranks, const ncclUniqueId& id, int rank) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t comm = nullptr;
  EXPECT_EQ(ncclCommInitRankConfig(&comm, n_ranks, id, rank, &config), ncclInProgress) << ncclGetLastError(nullptr);
  EXPECT_EQ(wait_ready(comm), ncclSuccess) << ncclGetLastError(comm);
  return comm;
}

// MoECCL's own stream, for host memory. Make it after the first NCCL call, which opens the library.
class HostStream {
 public:
  HostStream() {
    const auto make = find<int(void**)>("moecclStreamCreate");
    EXPECT_TRUE(make != nullptr && make(&stream_) == 0);
  }
  ~HostStream() {
    if (stream_ != nullptr) (void)find<int(void*)>("moecclStreamDestroy")(stream_);
  }
  HostStream(const HostStream&) = delete;
  HostStream& operator=(const HostStream&) = delete;
  cudaStream_t get() const { return static_cast<cudaStream_t>(stream_); }

 private:
  template <class F>
  static F* find(const char* name) {
    void* library = dlopen("libmoeccl.so.0", RTLD_NOW | RTLD_NOLOAD);
    return library == nullptr ? nullptr : reinterpret_cast<F*>(dlsym(library, name));
  }
  void* stream_ = nullptr;
};

}  // namespace moeccl::testing

#define EXPECT_NCCL(call) EXPECT_EQ((call), ncclSuccess) << ncclGetLastError(nullptr)
#define ASSERT_NCCL(call) ASSERT_EQ((call), ncclSuccess) << ncclGetLastError(nullptr)
