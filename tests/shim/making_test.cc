// SPDX-License-Identifier: Apache-2.0
// Communicators that are being made under the shim: how long ranks wait for each other, and how an abort or a failure
// ends the wait.
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "src/base/shim_requests.h"
#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

// What the shim asks the library for, in the calls below, which stand before the library's own.
struct Asked {
  int32_t timeout_ms = -1, init_timeout_ms = -1;
  int64_t id_ms = -1;
  uint64_t without_graph_mixing = 9;
  std::atomic<int> shrinks{0};
} asked;

// How these calls answer.
struct Answers {
  int failing_rank = -1;              // its init fails soon
  bool split_waits = false;           // until it is aborted
  bool earlier = false;               // as a library that does not know the shim's request for an id
  int64_t id_ms = -1;                 // in place of what the shim asks for
  std::atomic<int> threads_left{-1};  // so many can be started; -1: no limit
  std::atomic<int> threads_held{0};   // so many wait, before they begin, for
  std::atomic<bool> lets_go{false};
  std::function<void()> on_data_connection;
} answers;

template <class F>
F* in_library(const char* name) {
  void* library = dlopen("libmoeccl.so.0", RTLD_LAZY | RTLD_NOLOAD);
  return reinterpret_cast<F*>(dlsym(library, name));
}

}  // namespace

extern "C" __attribute__((visibility("default"))) moecclResult_t moecclCommInitRankConfig(
    moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank, const moecclConfig_t* config) {
  asked.timeout_ms = config->timeout_ms;
  asked.init_timeout_ms = config->init_timeout_ms;
  if (const ShimConfig* more = ShimConfig::of(config)) asked.without_graph_mixing = more->without_graph_mixing;
  if (rank == answers.failing_rank) {
    usleep(200'000);
    return moecclSystemError;
  }
  return in_library<decltype(moecclCommInitRankConfig)>("moecclCommInitRankConfig")(comm, n_ranks, id, rank, config);
}
extern "C" __attribute__((visibility("default"))) moecclResult_t moecclCommGetUniqueId(moecclComm_t comm,
                                                                                       moecclUniqueId* id) {
  if (comm == shim_asks_for_id()) {
    ShimIdRequest asks = ShimIdRequest::of(*id);
    asked.id_ms = asks.timeout_ms;
    if (answers.id_ms >= 0) asks.timeout_ms = answers.id_ms;
    *id = std::bit_cast<moecclUniqueId>(asks);
    if (answers.earlier) comm = reinterpret_cast<moecclComm_t>(uintptr_t{64});  // no communicator
  }
  return in_library<decltype(moecclCommGetUniqueId)>("moecclCommGetUniqueId")(comm, id);
}
extern "C" __attribute__((visibility("default"))) moecclResult_t moecclCommSplit(moecclComm_t comm, int color, int key,
                                                                                 moecclComm_t* made,
                                                                                 const moecclConfig_t* config) {
  if (const ShimConfig* more = ShimConfig::of(config)) asked.without_graph_mixing = more->without_graph_mixing;
  if (answers.split_waits) {
    while (!ShimConfig::of(config)->cancelled->load()) usleep(1000);
    return moecclAborted;
  }
  return in_library<decltype(moecclCommSplit)>("moecclCommSplit")(comm, color, key, made, config);
}
extern "C" __attribute__((visibility("default"))) moecclResult_t moecclCommShrink(moecclComm_t comm,
                                                                                  const int* excluded, int n_excluded,
                                                                                  moecclComm_t* made,
                                                                                  const moecclConfig_t* config,
                                                                                  int flags) {
  ++asked.shrinks;
  return in_library<decltype(moecclCommShrink)>("moecclCommShrink")(comm, excluded, n_excluded, made, config, flags);
}
extern "C" __attribute__((visibility("default"))) int pthread_create(pthread_t* thread,
                                                                     const pthread_attr_t* attributes,
                                                                     void* (*body)(void*), void* argument) noexcept {
  static auto* const real = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (answers.threads_left >= 0 && answers.threads_left.fetch_sub(1) <= 0) {
    answers.threads_left = 0;
    return EAGAIN;
  }
  if (answers.threads_held.load() == 0 || answers.threads_held.fetch_sub(1) <= 0)
    return real(thread, attributes, body, argument);
  struct Held {
    void* (*body)(void*);
    void* argument;
  };
  const auto wait = [](void* given) -> void* {
    const std::unique_ptr<Held> held(static_cast<Held*>(given));
    while (!answers.lets_go.load()) usleep(1000);
    return held->body(held->argument);
  };
  return real(thread, attributes, wait, new Held{body, argument});
}
// The library sets this option on connections between hosts only.
extern "C" __attribute__((visibility("default"))) int setsockopt(int fd, int level, int name, const void* value,
                                                                 socklen_t bytes) noexcept {
  static auto* const real = reinterpret_cast<decltype(&setsockopt)>(dlsym(RTLD_NEXT, "setsockopt"));
  if (level == IPPROTO_IP && name == IP_BIND_ADDRESS_NO_PORT && answers.on_data_connection)
    answers.on_data_connection();
  return real(fd, level, name, value, bytes);
}

namespace {

// NCCL has no deadlines, and PyTorch's ranks may come to their first collective minutes apart.
TEST(ShimMaking, RanksWaitWithoutLimitUnlessTheUserSetsOne) {
  for (const bool limited : {false, true}) {
    in_processes(1, [limited](int) {
      for (const char* name : {"MOECCL_TIMEOUT_MS", "MOECCL_INIT_TIMEOUT_MS"})
        limited ? setenv(name, "30000", 1) : unsetenv(name);
      ncclUniqueId id;
      ncclComm_t comm = nullptr;
      ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
      config.graphUsageMode = limited ? 1 : 2;
      ASSERT_NCCL(ncclGetUniqueId(&id));
      ASSERT_NCCL(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
      // 0 leaves it to the variable.
      EXPECT_EQ(asked.id_ms, limited ? 0 : 3'600'000) << "for the first rank";
      EXPECT_EQ(asked.init_timeout_ms, limited ? 0 : INT32_MAX);
      EXPECT_EQ(asked.timeout_ms, limited ? 0 : INT32_MAX);
      EXPECT_EQ(asked.without_graph_mixing, limited ? 1u : 0u);
      // A split without a config is like its parent, and one with a config follows that alone.
      ncclComm_t like = nullptr, other = nullptr;
      ncclConfig_t plain = NCCL_CONFIG_INITIALIZER;
      ASSERT_NCCL(ncclCommSplit(comm, 0, 0, &like, nullptr));
      EXPECT_EQ(asked.without_graph_mixing, limited ? 1u : 0u);
      ASSERT_NCCL(ncclCommSplit(comm, 0, 0, &other, &plain));
      EXPECT_EQ(asked.without_graph_mixing, 0u);
      for (const ncclComm_t c : {like, other, comm}) EXPECT_NCCL(ncclCommDestroy(c));
    });
  }
}

int threads_here() {
  const std::filesystem::directory_iterator all("/proc/self/task");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

// Programs make more ids than they use, and each has a thread.
TEST(ShimMaking, AMeetingPointEndsIfNobodyComesAndWaitsForTheOthersOfARankThatHasCome) {
  in_processes(1, [](int) {
    unsetenv("MOECCL_INIT_TIMEOUT_MS");
    answers.id_ms = 500;
    ncclUniqueId used, unused;
    ncclComm_t comms[2] = {};
    ASSERT_NCCL(ncclGetUniqueId(&used));
    const int with_one = threads_here();
    ASSERT_NCCL(ncclGetUniqueId(&unused));
    EXPECT_EQ(threads_here(), with_one + 1);
    std::thread first([&] { EXPECT_NCCL(ncclCommInitRank(&comms[0], 2, used, 0)); });
    usleep(1'500'000);
    EXPECT_NCCL(ncclCommInitRank(&comms[1], 2, used, 1));
    first.join();
    EXPECT_NE(ncclCommInitRank(&comms[0], 1, unused, 0), ncclSuccess) << "it has ended";
  });
}

TEST(ShimMaking, AnEarlierLibraryMakesIdsToo) {
  in_processes(1, [](int) {
    answers.earlier = true;
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// Its ranks wait for each other without a limit, and the group for all of them.
TEST(ShimMaking, ARankThatFailsEndsItsGroup) {
  for (const bool without_thread : {false, true}) {
    in_processes(1, [&](int) {
      alarm(20);
      unsetenv("MOECCL_INIT_TIMEOUT_MS");
      ncclUniqueId id;
      ncclComm_t comms[3] = {};
      ASSERT_NCCL(ncclGetUniqueId(&id));
      ASSERT_NCCL(ncclGroupStart());
      for (int r = 0; r < 3; ++r) ASSERT_NCCL(ncclCommInitRank(&comms[r], 3, id, r));
      if (without_thread)
        answers.threads_left = 2;
      else
        answers.failing_rank = 1;
      const auto begun = std::chrono::steady_clock::now();
      EXPECT_EQ(ncclGroupEnd(), ncclSystemError) << ncclGetLastError(nullptr);
      EXPECT_LT(seconds_since(begun), 10);
      const std::string why = ncclGetLastError(nullptr);
      EXPECT_EQ(why.find("abort"), std::string::npos) << why;
      for (const ncclComm_t comm : comms) EXPECT_EQ(comm, nullptr);
    });
  }
}

// Rank 1 comes too late to what rank 0 makes from the communicator of both.
TEST(ShimMaking, ARankThatFailsEndsWhatItsGroupMakesFromOthers) {
  for (const bool grows : {false, true}) {
    Board* board = new_board();
    in_processes(2, [&](int rank) {
      alarm(20);
      for (const char* name : {"MOECCL_TIMEOUT_MS", "MOECCL_INIT_TIMEOUT_MS"}) unsetenv(name);
      ncclComm_t comm = nullptr, made = nullptr, other = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
      ncclUniqueId id;
      const auto make = [&] {
        return grows ? ncclCommGrow(comm, 3, rank == 0 ? &id : nullptr, -1, &made, nullptr)
                     : ncclCommSplit(comm, 0, 0, &made, nullptr);
      };
      if (rank == 1) {
        while (board->counters[0].load() == 0) usleep(1000);
        EXPECT_EQ(make(), ncclRemoteError) << ncclGetLastError(nullptr);
        EXPECT_NCCL(ncclCommAbort(comm));
        return;
      }
      ASSERT_NCCL(ncclCommGetUniqueId(comm, &id));
      answers.failing_rank = 0;
      const auto begun = std::chrono::steady_clock::now();
      ASSERT_NCCL(ncclGroupStart());
      ASSERT_NCCL(make());
      ASSERT_NCCL(ncclCommInitRank(&other, 1, id, 0));
      EXPECT_EQ(ncclGroupEnd(), ncclSystemError) << ncclGetLastError(nullptr);
      EXPECT_LT(seconds_since(begun), patient(2));
      EXPECT_EQ(made, nullptr);
      // The communicator has ended, for a further split too.
      EXPECT_EQ(ncclCommSplit(comm, 0, 0, &made, nullptr), ncclInvalidUsage) << ncclGetLastError(nullptr);
      EXPECT_NCCL(ncclCommDestroy(comm));
      EXPECT_LT(seconds_since(begun), patient(4));
      board->counters[0].store(1);
    });
  }
}

TEST(ShimMaking, InitAllNamesADeviceThatDoesNotExist) {
  in_processes(1, [](int) {
    alarm(20);
    unsetenv("MOECCL_INIT_TIMEOUT_MS");
    setenv("MOECCL_CUDA_DRIVER", std::getenv("MOECCL_TEST_FAKE_CUDA"), 1);  // it has one device
    setenv("MOECCL_SHIM_MODE", "moeccl", 1);
    ncclComm_t comms[4] = {};
    const auto refused = [&](const int* devices, const char* named) {
      EXPECT_EQ(ncclCommInitAll(comms, 4, devices), ncclInvalidArgument);
      const std::string why = ncclGetLastError(nullptr);
      EXPECT_NE(why.find(named), std::string::npos) << why;
    };
    const int beyond[] = {0, 0, 0, 99}, before[] = {0, -1, 0, 0}, good[] = {0, 0, 0, 0};
    refused(beyond, "devlist[3] is 99");
    refused(before, "devlist[1] is -1");
    refused(nullptr, "ndev is 4");
    ASSERT_NCCL(ncclCommInitAll(comms, 4, good));
    for (const ncclComm_t comm : comms) EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// A dead rank is noticed nevertheless.
TEST(ShimMaking, ARankThatDiesWhileOthersComeIsNamed) {
  Board* board = new_board();
  const auto work = [&](int rank) {
    unsetenv("MOECCL_INIT_TIMEOUT_MS");
    const ncclUniqueId id = meet(*board, rank);
    ncclComm_t comm = nullptr;
    if (rank == 1) {
      std::thread([&] { (void)ncclCommInitRank(&comm, 3, id, rank); }).detach();
      usleep(500'000);
      kill(getpid(), SIGKILL);
    }
    const auto begun = std::chrono::steady_clock::now();
    if (rank == 0) {
      EXPECT_EQ(ncclCommInitRank(&comm, 3, id, rank), ncclRemoteError);
      EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("rank 1"), std::string::npos) << ncclGetLastError(nullptr);
      EXPECT_LT(seconds_since(begun), 20);
    }
  };
  in_processes(3, work, {1});
}

// A watchdog sees the communicator as soon as NCCL has written it to the program's variable.
TEST(ShimMaking, AnAbortEndsAnInitThatWaitsForOtherRanks) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    static ncclComm_t comm = nullptr;
    const std::atomic_ref<ncclComm_t> seen(comm);
    std::thread maker([&] {
      EXPECT_EQ(ncclCommInitRank(&comm, 2, id, 0), ncclInvalidUsage);
      EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("aborted while it was being made"), std::string::npos)
          << ncclGetLastError(nullptr);
    });
    while (seen.load() == nullptr) usleep(1000);
    ncclResult_t state = ncclSuccess;
    EXPECT_NCCL(ncclCommGetAsyncError(seen.load(), &state));
    EXPECT_EQ(state, ncclInProgress);
    const auto begun = std::chrono::steady_clock::now();
    EXPECT_NCCL(ncclCommAbort(seen.load()));
    maker.join();
    EXPECT_LT(seconds_since(begun), 10) << "a third of the timeout";
    EXPECT_EQ(comm, nullptr);
    // A rank that comes later learns of it.
    ncclComm_t other = nullptr;
    EXPECT_EQ(ncclCommInitRank(&other, 2, id, 1), ncclRemoteError);
  });
}

// Rank 1 stops when all have met and connect to each other. Nothing limits rank 0's wait but its abort.
TEST(ShimMaking, AnAbortEndsAnInitThatConnectsToOtherHosts) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    unsetenv("MOECCL_INIT_TIMEOUT_MS");
    setenv("MOECCL_HOST_ID", ("host" + std::to_string(rank)).c_str(), 1);
    setenv("MOECCL_SOCKET_ADDR", "127.0.0.1", 1);
    setenv("MOECCL_SOCKET_IFNAME", "lo", 1);
    setenv("MOECCL_NET", "tcp", 1);
    answers.on_data_connection = [&] {
      board->counters[0].store(1);
      while (board->counters[1].load() == 0) usleep(1000);
    };
    static ncclComm_t comm = nullptr;
    const ncclUniqueId id = meet(*board, rank);
    if (rank == 1) {
      EXPECT_EQ(ncclCommInitRank(&comm, 2, id, rank), ncclRemoteError);
      return;
    }
    std::thread maker([&] { EXPECT_EQ(ncclCommInitRank(&comm, 2, id, rank), ncclInvalidUsage); });
    while (board->counters[0].load() == 0) usleep(1000);
    usleep(200'000);
    const auto begun = std::chrono::steady_clock::now();
    EXPECT_NCCL(ncclCommAbort(std::atomic_ref<ncclComm_t>(comm).load()));
    maker.join();
    EXPECT_LT(seconds_since(begun), patient(1));
    board->counters[1].store(1);
  });
}

// Rank 1 never splits. Rank 0 aborts its own part, after which the parent is free, and then ends the parent.
TEST(ShimMaking, AnAbortedSplitLeavesItsParent) {
  for (const bool abort : {true, false}) {
    Board* board = new_board();
    in_processes(2, [&](int rank) {
      ncclComm_t comm = nonblocking(2, meet(*board, rank), rank), part = nullptr;
      if (rank == 1) {
        while (board->counters[0].load() == 0) usleep(1000);
        EXPECT_NCCL(ncclCommAbort(comm));
        return;
      }
      EXPECT_EQ(ncclCommSplit(comm, 0, 0, &part, nullptr), ncclInProgress);
      ncclResult_t state = ncclSuccess;
      EXPECT_NCCL(ncclCommGetAsyncError(comm, &state));
      EXPECT_EQ(state, ncclInProgress);
      usleep(200'000);
      const auto begun = std::chrono::steady_clock::now();
      EXPECT_NCCL(ncclCommAbort(part));
      EXPECT_NCCL(ncclCommGetAsyncError(comm, &state));
      EXPECT_EQ(state, ncclSuccess) << "the parent";
      ncclRedOp_t op = ncclSum;
      const float scalar = 2;
      EXPECT_NCCL(
          ncclRedOpCreatePreMulSum(&op, const_cast<float*>(&scalar), ncclFloat32, ncclScalarHostImmediate, comm));
      const ncclResult_t ended = abort ? ncclCommAbort(comm) : ncclCommDestroy(comm);
      EXPECT_NCCL(ended);
      EXPECT_LT(seconds_since(begun), 10) << "a third of the timeout";
      board->counters[0].store(1);
    });
  }
}

// The other way of a split is for a parent that was revoked.
TEST(ShimMaking, AnAbortedSplitTakesNoOtherWay) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ncclComm_t part = nullptr;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    const ncclComm_t comm = nonblocking(1, id, 0);
    answers.split_waits = true;
    EXPECT_EQ(ncclCommSplit(comm, 0, 0, &part, nullptr), ncclInProgress);
    EXPECT_NCCL(ncclCommAbort(part));
    usleep(200'000);
    EXPECT_EQ(asked.shrinks, 0);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// The thread that splits begins only after the parent has been aborted, as it would after a revocation.
TEST(ShimMaking, ASplitThatBeginsAfterAnAbortTakesNoOtherWay) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ncclComm_t part = nullptr;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    const ncclComm_t comm = nonblocking(1, id, 0);
    answers.threads_held = 1;
    EXPECT_EQ(ncclCommSplit(comm, 0, 0, &part, nullptr), ncclInProgress);
    EXPECT_NCCL(ncclCommAbort(part));
    std::thread aborts([&] { EXPECT_NCCL(ncclCommAbort(comm)); });
    usleep(200'000);
    answers.lets_go = true;
    aborts.join();
    EXPECT_EQ(asked.shrinks, 0);
  });
}

// Rank 2 neither shrinks nor dies.
TEST(ShimMaking, AnAbortEndsWhatIsBeingShrunkFromIt) {
  for (const bool own : {false, true}) {
    Board* board = new_board();
    in_processes(3, [&](int rank) {
      ncclComm_t comm = nonblocking(3, meet(*board, rank), rank), rest = nullptr;
      if (rank == 0) {
        int excluded = 1;
        EXPECT_EQ(ncclCommShrink(comm, &excluded, 1, &rest, nullptr, NCCL_SHRINK_ABORT), ncclInProgress);
        usleep(200'000);
        const auto begun = std::chrono::steady_clock::now();
        if (own) {
          EXPECT_NCCL(ncclCommAbort(rest));
        }
        EXPECT_NCCL(ncclCommAbort(comm));
        if (!own) {
          EXPECT_EQ(wait_ready(rest), ncclInvalidUsage);
          EXPECT_NCCL(ncclCommAbort(rest));
        }
        EXPECT_LT(seconds_since(begun), 10) << "a third of the timeout";
        board->counters[0].store(1);
      }
      while (board->counters[0].load() == 0) usleep(1000);
      if (rank > 0) {
        EXPECT_NCCL(ncclCommAbort(comm));
      }
    });
  }
}

// PyTorch deregisters before it aborts. Rank 1 never splits.
TEST(ShimMaking, DeregistrationIsPossibleMeanwhile) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nonblocking(2, meet(*board, rank), rank), part = nullptr;
    std::vector<char> memory(4096);
    void* handles[2] = {};
    ncclWindow_t window = nullptr;
    ncclRedOp_t op = ncclSum;
    float scalar = 2;
    for (void*& h : handles) ASSERT_NCCL(ncclCommRegister(comm, memory.data(), memory.size(), &h));
    ASSERT_NCCL(ncclCommWindowRegister(comm, memory.data(), memory.size(), &window, 0));
    ASSERT_NCCL(ncclRedOpCreatePreMulSum(&op, &scalar, ncclFloat32, ncclScalarHostImmediate, comm));
    EXPECT_NCCL(ncclCommDeregister(comm, nullptr));
    EXPECT_EQ(ncclCommDeregister(comm, memory.data()), ncclInvalidUsage) << "no handle";
    if (rank == 0) {
      EXPECT_EQ(ncclCommSplit(comm, 0, 0, &part, nullptr), ncclInProgress);
      EXPECT_NCCL(ncclCommDeregister(comm, handles[0]));
      EXPECT_NCCL(ncclCommWindowDeregister(comm, window));
      EXPECT_NCCL(ncclRedOpDestroy(op, comm));
      EXPECT_NCCL(ncclCommAbort(part));
      EXPECT_NCCL(ncclCommAbort(comm));
      board->counters[0].store(1);
      return;
    }
    while (board->counters[0].load() == 0) usleep(1000);
    EXPECT_NCCL(ncclCommAbort(comm));
  });
}

TEST(ShimMaking, DeregistrationIsPossibleWhileSuspended) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    void* handle = nullptr;
    char memory[64];
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
    ASSERT_NCCL(ncclCommRegister(comm, memory, sizeof memory, &handle));
    ASSERT_NCCL(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    EXPECT_NCCL(ncclCommDeregister(comm, handle));
    EXPECT_NCCL(ncclCommAbort(comm));
  });
}

}  // namespace
}  // namespace moeccl::testing
