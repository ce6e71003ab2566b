// SPDX-License-Identifier: Apache-2.0
// Additions to NCCL after 2.28: those that MoECCL serves, and those that it refuses with a sentence.
#include <dlfcn.h>
#include <signal.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

std::string last() { return ncclGetLastError(nullptr); }

TEST(ShimLater, AConfigOfAnyLaterVersionIsTaken) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    struct {
      ncclConfig_t known = NCCL_CONFIG_INITIALIZER;
      int unknown[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    } config;
    config.known.size = sizeof config;
    config.known.version = 23206;
    config.known.commName = "new";
    config.known.graphUsageMode = 1;
    config.known.numRmaCtx = 2;
    ncclComm_t comm = nullptr, half = nullptr;
    ASSERT_NCCL(ncclCommInitRankConfig(&comm, 3, meet(*board, rank), rank, &config.known));
    float x = static_cast<float>(rank), sum = 0;
    EXPECT_NCCL(ncclAllReduce(&x, &sum, 1, ncclFloat32, ncclSum, comm, nullptr));
    EXPECT_EQ(sum, 3);
    EXPECT_NCCL(ncclCommSplit(comm, rank % 2, rank, &half, &config.known));
    EXPECT_NCCL(ncclCommDestroy(half));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// Two ranks are joined by more. All collectives of the new communicator are those of its own ranks, and the old
// communicator still works.
void grow_to(int n, const char* topology = nullptr) {
  Board* board = new_board();
  in_processes(n, [&](int rank) {
    if (topology != nullptr) setenv("MOECCL_TOPOLOGY", topology, 1);
    const ncclUniqueId id = meet(*board, rank);
    ncclComm_t comm = nullptr, grown = nullptr;
    if (rank < 2) {
      ASSERT_NCCL(ncclCommInitRank(&comm, 2, id, rank));
    }
    // Rank 1 makes the id of the larger communicator.
    if (rank == 1) {
      ASSERT_NCCL(ncclCommGetUniqueId(comm, &board->id));
      board->counters[0] = 1;
    }
    while (rank != 0 && board->counters[0] == 0) usleep(1000);
    const ncclUniqueId more = board->id;
    if (comm != nullptr) {
      EXPECT_EQ(ncclCommGrow(comm, 2, nullptr, -1, &grown, nullptr), ncclInvalidArgument);
    }
    ASSERT_NCCL(ncclCommGrow(comm, n, rank == 0 ? nullptr : &more, rank < 2 ? -1 : rank, &grown, nullptr));
    int n_ranks = 0, here = -1;
    EXPECT_NCCL(ncclCommCount(grown, &n_ranks));
    EXPECT_NCCL(ncclCommUserRank(grown, &here));
    EXPECT_EQ(n_ranks, n);
    EXPECT_EQ(here, rank);
    for (const size_t count : {size_t{1}, size_t{1000}, size_t{300000}}) {
      std::vector<int32_t> in(count), out(count);
      for (size_t i = 0; i < count; ++i) in[i] = static_cast<int32_t>(i) + 1000 * rank;
      ASSERT_NCCL(ncclAllReduce(in.data(), out.data(), count, ncclInt32, ncclSum, grown, nullptr));
      for (size_t i = 0; i < count; ++i) {
        ASSERT_EQ(out[i], n * static_cast<int32_t>(i) + 1000 * n * (n - 1) / 2) << i;
      }
    }
    std::vector<int32_t> all(static_cast<size_t>(n));
    EXPECT_NCCL(ncclAllGather(&rank, all.data(), 1, ncclInt32, grown, nullptr));
    for (int r = 0; r < n; ++r) EXPECT_EQ(all[static_cast<size_t>(r)], r);
    if (comm != nullptr) {
      int32_t both = 0;
      EXPECT_NCCL(ncclAllReduce(&rank, &both, 1, ncclInt32, ncclSum, comm, nullptr));
      EXPECT_EQ(both, 1);
      EXPECT_NCCL(ncclCommDestroy(comm));
    }
    EXPECT_NCCL(ncclCommDestroy(grown));
  });
}

TEST(ShimLater, ACommunicatorGrows) {
  grow_to(3);
  grow_to(4);
}

// The variable describes the ranks of the old communicator.
TEST(ShimLater, ATopologyFromTheEnvironmentDoesNotKeepACommunicatorFromGrowing) { grow_to(3, "auto"); }

TEST(ShimLater, GrowingWantsOneId) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr, grown = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    EXPECT_EQ(ncclCommGrow(comm, 3, nullptr, -1, &grown, nullptr), ncclInvalidArgument);
    EXPECT_NE(last().find("CommGetUniqueId"), std::string::npos) << last();
    EXPECT_EQ(grown, nullptr);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimLater, ASuspendedCommunicatorRunsNothingUntilItIsResumed) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    EXPECT_EQ(ncclCommResume(comm), ncclInvalidUsage);
    EXPECT_EQ(ncclCommSuspend(comm, 0), ncclInvalidArgument);
    ASSERT_NCCL(ncclCommSuspend(comm, NCCL_SUSPEND_MEM));
    float x = 1;
    EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidUsage);
    EXPECT_NE(last().find("ncclCommResume"), std::string::npos) << last();
    uint64_t value = 7;
    EXPECT_NCCL(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &value));
    EXPECT_EQ(value, 1u);
    int n = 0;
    EXPECT_NCCL(ncclCommCount(comm, &n));
    ASSERT_NCCL(ncclCommResume(comm));
    EXPECT_NCCL(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &value));
    EXPECT_EQ(value, 0u);
    EXPECT_NCCL(ncclCommMemStats(comm, ncclStatGpuMemTotal, &value));
    EXPECT_GT(value, 0u);
    uint64_t persistent = 0;
    EXPECT_NCCL(ncclCommMemStats(comm, ncclStatGpuMemPersist, &persistent));
    EXPECT_EQ(persistent, value) << "nothing of it can be suspended";
    EXPECT_NCCL(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, nullptr));
    EXPECT_EQ(x, 2);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimLater, WhatIsAskedAndWhatIsRefused) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
    ncclCommProperties_t properties{};
    EXPECT_EQ(ncclCommQueryProperties(comm, &properties), ncclInvalidArgument);
    properties.size = sizeof properties;
    properties.magic = NCCL_CONFIG_MAGIC;
    properties.nRanks = -1;
    EXPECT_NCCL(ncclCommQueryProperties(comm, &properties));
    EXPECT_EQ(properties.nRanks, 1);
    EXPECT_EQ(properties.nLsaTeams, 1);
    EXPECT_FALSE(properties.deviceApiSupport);

    void* buffer = nullptr;
    ASSERT_NCCL(ncclMemAlloc(&buffer, 1 << 16));
    ncclWindow_t window = nullptr;
    ASSERT_NCCL(
        ncclCommWindowRegister(comm, buffer, 1 << 16, &window, NCCL_WIN_COLL_SYMMETRIC | NCCL_WIN_STRICT_ORDERING));
    void* pointer = nullptr;
    EXPECT_NCCL(ncclWinGetUserPtr(comm, window, &pointer));
    EXPECT_EQ(pointer, buffer);
    EXPECT_EQ(ncclGetPeerDevicePointer(window, 0, 0, &pointer), ncclInvalidUsage);
    EXPECT_EQ(ncclGetLsaMultimemDevicePointer(window, 0, &pointer), ncclInvalidUsage);
    EXPECT_EQ(ncclGetMultimemDevicePointer(window, 0, {}, &pointer), ncclInvalidUsage);
    EXPECT_EQ(ncclGetLsaDevicePointer(window, 0, 0, &pointer), ncclInvalidUsage);
    ncclCftLeId id_of = 0;
    size_t offset_of = 0;
    EXPECT_EQ(ncclGetMultimemDeviceLeInfo(window, 0, &id_of, &offset_of), ncclInvalidUsage);
    EXPECT_EQ(ncclGetCftDeviceLeInfo(window, 0, 0, {1, 0, 1}, &id_of, &offset_of), ncclInvalidUsage);
    EXPECT_EQ(ncclGetPeerDeviceLeInfo(window, 0, 0, &id_of, &offset_of), ncclInvalidUsage);
    EXPECT_NE(last().find("ncclGetPeerDeviceLeInfo"), std::string::npos) << last();
    EXPECT_EQ(ncclTeamCft(comm, NCCL_CFT_TEAM_FLAT).nRanks, 1);
    EXPECT_EQ(ncclTeamCftMultimem(comm).nRanks, 1);
    EXPECT_NCCL(ncclCommWindowDeregister(comm, window));
    EXPECT_EQ(ncclWinGetUserPtr(comm, window, &pointer), ncclInvalidArgument);
    EXPECT_NCCL(ncclMemFree(buffer));

    ncclParamHandle_t param = nullptr;
    EXPECT_EQ(ncclParamBind(&param, "NCCL_BUFFSIZE"), ncclInvalidArgument);
    const char** keys = nullptr;
    int n_keys = -1;
    EXPECT_NCCL(ncclParamGetAllParameterKeys(&keys, &n_keys));
    EXPECT_EQ(n_keys, 0);
    ncclParamDumpAll();
    EXPECT_NE(std::string(ncclGetErrorString(ncclTimeout)), "unknown result code");
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimLater, WindowsEndWithTheirCommunicator) {
  in_processes(1, [](int) {
    setenv("MOECCL_SHIM_NCCL", std::getenv("MOECCL_TEST_FAKE_NCCL"), 1);
    char memory[64] = {};
    void* pointer = nullptr;
    for (const bool abort : {false, true}) {
      ncclUniqueId id;
      ncclComm_t comm = nullptr, next = nullptr;
      ncclWindow_t window = nullptr;
      ASSERT_NCCL(ncclGetUniqueId(&id));
      ASSERT_NCCL(ncclCommInitRank(&comm, 1, id, 0));
      ASSERT_NCCL(ncclCommWindowRegister(comm, memory, sizeof memory, &window, NCCL_WIN_DEFAULT));
      EXPECT_EQ(ncclGetPeerDevicePointer(window, 0, 0, &pointer), ncclInvalidUsage);
      ASSERT_NCCL(abort ? ncclCommAbort(comm) : ncclCommDestroy(comm));
      EXPECT_EQ(ncclGetPeerDevicePointer(window, 0, 0, &pointer), ncclSystemError)
          << "what is no window of MoECCL's goes to the stand-in for NCCL";
      // The next communicator often gets the same handle.
      ASSERT_NCCL(ncclGetUniqueId(&id));
      ASSERT_NCCL(ncclCommInitRank(&next, 1, id, 0));
      EXPECT_EQ(ncclWinGetUserPtr(next, window, &pointer), ncclInvalidArgument);
      EXPECT_NCCL(ncclCommDestroy(next));
    }
  });
}

// Returns the predicted time of a call, which shows the plan that would run it: the cheapest, or a more expensive one
// that its config asks for.
float predicted(size_t count, ncclComm_t comm, const ncclCollConfig_t* config) {
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  std::vector<int32_t> memory(count);
  EXPECT_NCCL(ncclGroupStart());
  EXPECT_NCCL(ncclAllReduceConfig(memory.data(), memory.data(), count, ncclInt32, ncclSum, comm, nullptr, config));
  EXPECT_NCCL(ncclGroupSimulateEnd(&info));
  return info.estimatedTime;
}

TEST(ShimLater, ACallsConfigChoosesItsAlgorithm) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    constexpr size_t kCount = 3000;
    std::vector<int32_t> in(kCount, rank + 1), out(kCount);
    const auto sum = [&](const ncclCollConfig_t* config) {
      std::fill(out.begin(), out.end(), 0);
      const ncclResult_t result =
          ncclAllReduceConfig(in.data(), out.data(), kCount, ncclInt32, ncclSum, comm, nullptr, config);
      if (result == ncclSuccess) {
        EXPECT_EQ(std::count(out.begin(), out.end(), 3), static_cast<long>(kCount));
      }
      return result;
    };
    EXPECT_NCCL(sum(nullptr));
    const float free = predicted(kCount, comm, nullptr);
    for (const char* names : {"RING_SIMPLE", "nonsense,ring", "TREE_LL128,RING_LL"}) {
      ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
      config.algSelection = names;
      EXPECT_NCCL(sum(&config)) << names;
      EXPECT_NCCL(sum(&config)) << names;
      EXPECT_GT(predicted(kCount, comm, &config), free) << names;
      EXPECT_NCCL(ncclAllReduce(in.data(), out.data(), kCount, ncclInt32, ncclSum, comm, nullptr));
      EXPECT_EQ(predicted(kCount, comm, nullptr), free) << "the next plain call is free again";
    }
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.algSelection = "NVLS_SIMPLE";
    EXPECT_EQ(sum(&config), ncclInvalidUsage);
    EXPECT_NE(last().find("NVLS_SIMPLE"), std::string::npos) << last();
    config.forceAlgSelection = 0;
    EXPECT_NCCL(sum(&config));
    config.forceAlgSelection = 7;
    EXPECT_EQ(sum(&config), ncclInvalidArgument);

    ncclConfigExt_t option = {nullptr, {MOECCL_NCCL_VENDOR, MOECCL_NCCL_OPTION_ALGORITHM}, {.s = "no such"}};
    ncclConfigExt_t foreign = {&option, {77, 1}, {.raw = nullptr}};
    config = NCCL_COLLCONFIG_INITIALIZER;
    config.ext = &foreign;
    EXPECT_EQ(sum(&config), ncclInvalidUsage);
    EXPECT_NE(last().find("no such"), std::string::npos) << last();
    option.val.s = "ring";
    EXPECT_NCCL(sum(&config));
    option.next = &foreign;
    EXPECT_EQ(sum(&config), ncclInvalidArgument) << "a circle";

    // In a group, the program's copy may no longer exist when the group ends.
    ncclCollConfig_t ring = NCCL_COLLCONFIG_INITIALIZER;
    std::string name = "ring";
    ring.algSelection = name.c_str();
    int32_t one = 1, two = 0;
    EXPECT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclAllReduceConfig(&one, &two, 1, ncclInt32, ncclSum, comm, nullptr, &ring));
    name = "gone";
    ring = {};
    EXPECT_NCCL(ncclGroupEnd());
    EXPECT_EQ(two, 2);
    ring = NCCL_COLLCONFIG_INITIALIZER;
    ring.algSelection = "ring";
    EXPECT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclAllReduceConfig(&one, &two, 1, ncclInt32, ncclSum, comm, nullptr, &ring));
    EXPECT_NCCL(ncclAllReduce(in.data(), out.data(), 1, ncclInt32, ncclSum, comm, nullptr));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage) << "one algorithm for an operation of a group";

    ncclCollConfig_t event = NCCL_COLLCONFIG_INITIALIZER;
    event.launchCompletionEvent = reinterpret_cast<cudaEvent_t>(&one);
    EXPECT_EQ(sum(&event), ncclInvalidUsage) << "there is no device";
    EXPECT_NCCL(sum(nullptr));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimLater, EveryCollectiveTakesAConfig) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.minCTAs = 1;
    config.userProfilerTag = 5;
    const int32_t mine[2] = {10 + rank, 20 + rank};
    int32_t got[4] = {};
    EXPECT_NCCL(ncclReduceConfig(mine, got, 2, ncclInt32, ncclSum, 0, comm, nullptr, &config));
    if (rank == 0) {
      EXPECT_EQ(got[1], 41);
    }
    EXPECT_NCCL(ncclBroadcastConfig(mine, got, 2, ncclInt32, 1, comm, nullptr, &config));
    EXPECT_EQ(got[0], 11);
    EXPECT_NCCL(ncclAllGatherConfig(mine, got, 2, ncclInt32, comm, nullptr, &config));
    EXPECT_EQ(got[2], 11);
    EXPECT_NCCL(ncclReduceScatterConfig(mine, got, 1, ncclInt32, ncclMax, comm, nullptr, &config));
    EXPECT_EQ(got[0], rank == 0 ? 11 : 21);
    EXPECT_NCCL(ncclAlltoAllConfig(mine, got, 1, ncclInt32, comm, nullptr, &config));
    EXPECT_EQ(got[1], rank == 0 ? 11 : 21);
    EXPECT_NCCL(ncclGatherConfig(mine, got, 1, ncclInt32, 0, comm, nullptr, &config));
    EXPECT_NCCL(ncclScatterConfig(mine, got, 1, ncclInt32, 0, comm, nullptr, &config));
    EXPECT_EQ(got[0], rank == 0 ? 10 : 20);
    config.magic = 1;
    EXPECT_EQ(ncclScatterConfig(mine, got, 1, ncclInt32, 0, comm, nullptr, &config), ncclInvalidArgument);
    EXPECT_NE(last().find("NCCL_COLLCONFIG_INITIALIZER"), std::string::npos) << last();
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimLater, EncryptionIsRefusedAloud) {
  in_processes(1, [](int) {
    ncclEncryptionConfig_t config = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
    EXPECT_NCCL(ncclSetEncryption(&config)) << "none is what there is";
    config.mode = NCCL_ENCRYPTION_MODE_PSK;
    config.psk = "secret";
    EXPECT_EQ(ncclSetEncryption(&config), ncclInvalidUsage);
    EXPECT_NE(last().find("MOECCL_ENCRYPT"), std::string::npos) << last();
    setenv("MOECCL_ENCRYPT", "1", 1);
    EXPECT_NCCL(ncclSetEncryption(&config)) << "the user says so";
    unsetenv("MOECCL_ENCRYPT");
    EXPECT_EQ(last().find("secret"), std::string::npos);
    EXPECT_EQ(ncclSetEncryption(nullptr), ncclInvalidArgument);
  });
}

// Rank 0 is killed during the meeting of the survivors, so NCCL's list of the ranks to leave out is no longer complete.
TEST(ShimLater, ALeaderThatIsKilledWhileOthersShrinkIsNamed) {
  Board* board = new_board();
  std::atomic<int>& leader = board->counters[0];
  const auto work = [&](int rank) {
    setenv("MOECCL_INIT_TIMEOUT_MS", "20000", 1);
    ncclComm_t comm = nullptr, fewer = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 3, meet(*board, rank), rank));
    int excluded = 2;
    if (rank == 2) _exit(0);
    if (rank == 0) {  // waits for rank 1, which kills it
      leader = getpid();
      (void)ncclCommShrink(comm, &excluded, 1, &fewer, nullptr, NCCL_SHRINK_ABORT);
      return;
    }
    while (leader == 0) usleep(1000);
    usleep(50'000);
    kill(leader, SIGKILL);
    EXPECT_EQ(ncclCommShrink(comm, &excluded, 1, &fewer, nullptr, NCCL_SHRINK_ABORT), ncclRemoteError);
    EXPECT_NE(last().find("rank 0 is gone too"), std::string::npos) << last();
    EXPECT_NCCL(ncclCommAbort(comm));
  };
  in_processes(3, work, {0});
}

}  // namespace
}  // namespace moeccl::testing
