// SPDX-License-Identifier: Apache-2.0
// The calls that the shim forwards to the real NCCL (here the stand-in of fake_nccl.c): single functions, whole jobs,
// and how all ranks come to the same decision.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

const char* fake_path() {
  const char* path = std::getenv("MOECCL_TEST_FAKE_NCCL");
  return path != nullptr ? path : "";
}

// Returns a counter of the stand-in, once the shim has opened it.
int ask_fake(const char* counter, const char* name) {
  void* fake = dlopen(fake_path(), RTLD_NOW | RTLD_NOLOAD);
  if (fake == nullptr) return 0;
  auto calls = reinterpret_cast<int (*)(const char*)>(dlsym(fake, counter));
  return calls == nullptr ? -1 : calls(name);
}
int fake_calls(const char* name) { return ask_fake("fakeNcclCalls", name); }
int grouped_calls(const char* name) { return ask_fake("fakeNcclGroupedCalls", name); }

// Called inside a forked child, before its first NCCL call.
void set_shim(const char* mode, bool has_nccl) {
  setenv("MOECCL_SHIM_MODE", mode, 1);
  setenv("MOECCL_SHIM_NCCL", has_nccl ? fake_path() : "/nonexistent/libnccl.so.2", 1);
}

// The shim keeps a group's calls until its end, and so must keep the operators that they use.
TEST(ShimForward, AnOperatorThatIsDestroyedInAGroupOutlivesTheGroupsCalls) {
  in_processes(1, [](int) {
    set_shim("nccl", true);
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 3, id, 1));
    unsigned char x[4] = {};
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclAllReduce(x, x, 4, ncclUint8, static_cast<ncclRedOp_t>(5), comm, nullptr));
    EXPECT_NCCL(ncclRedOpDestroy(static_cast<ncclRedOp_t>(5), comm));
    EXPECT_EQ(fake_calls("RedOpDestroy"), 0);
    EXPECT_NCCL(ncclGroupEnd());
    EXPECT_EQ(x[3], 0xfa) << "the stand-in's mark";
    EXPECT_EQ(fake_calls("RedOpDestroy"), 1);
  });
}

// NCCL defers these calls to the end of a group, so it must know of the group.
TEST(ShimForward, CallsThatNcclGroupsReachItInAGroup) {
  in_processes(1, [](int) {
    set_shim("nccl", true);
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    const auto in_group = [&](const char* name, const auto& call) {
      ncclComm_t comm = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, 3, id, 1));
      const int ended = fake_calls("GroupEnd");
      ASSERT_NCCL(ncclGroupStart());
      (void)call(comm);
      EXPECT_EQ(grouped_calls(name), 1) << name;
      EXPECT_EQ(fake_calls("GroupEnd"), ended) << name;
      EXPECT_NCCL(ncclGroupEnd());
      EXPECT_EQ(fake_calls("GroupEnd"), ended + 1) << name;
    };
    in_group("DevCommCreate", [](ncclComm_t c) { return ncclDevCommCreate(c, nullptr, nullptr); });
    in_group("CommSuspend", [](ncclComm_t c) { return ncclCommSuspend(c, NCCL_SUSPEND_MEM); });
    in_group("CommResume", ncclCommResume);
    in_group("CommRevoke", [](ncclComm_t c) { return ncclCommRevoke(c, NCCL_REVOKE_DEFAULT); });
    in_group("CommAbort", ncclCommAbort);
    in_group("CommDestroy", ncclCommDestroy);
  });
}

// The same for communicators that the shim has made and handed to NCCL.
TEST(ShimForward, CommunicatorsThatWereHandedOverEndInNcclsGroup) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    set_shim(rank == 1 ? "nccl" : "auto", true);
    ncclComm_t first = nullptr, second = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&first, 2, meet(*board, rank), rank));
    if (rank == 0) {
      ASSERT_NCCL(ncclGetUniqueId(&board->id));
      board->counters[0] = 1;
    }
    while (board->counters[0] == 0) usleep(1000);
    ASSERT_NCCL(ncclCommInitRank(&second, 2, board->id, rank));
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclCommAbort(first));
    EXPECT_NCCL(ncclCommDestroy(second));
    EXPECT_EQ(grouped_calls("CommAbort"), 1);
    EXPECT_EQ(grouped_calls("CommDestroy"), 1);
    EXPECT_NCCL(ncclGroupEnd());
  });
}

// The last question comes while the communicator changes hands.
TEST(ShimForward, AskingNeverFailsWhileTheBackgroundHandsOver) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    set_shim(rank == 1 ? "nccl" : "auto", true);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const int n_rounds = std::max(50, static_cast<int>(300 * setting("MOECCL_TEST_SCALE")));
    for (int round = 1; round <= n_rounds && !::testing::Test::HasFailure(); ++round) {
      if (rank == 0) {
        ASSERT_NCCL(ncclGetUniqueId(&board->id));
        board->counters[0] = round;
      }
      while (board->counters[0] < round) std::this_thread::yield();
      ncclComm_t comm = nullptr;
      ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, board->id, rank, &config), ncclInProgress);
      board->counters[1]++;
      while (board->counters[1] < 2 * round) std::this_thread::yield();  // both have copied the id
      ncclResult_t state = ncclInProgress;
      while (state == ncclInProgress) ASSERT_NCCL(ncclCommGetAsyncError(comm, &state)) << "round " << round;
      EXPECT_NCCL(state);
      EXPECT_NCCL(ncclCommDestroy(comm));
    }
  });
}

TEST(ShimForward, NcclModeForwardsEveryFunction) {
  in_processes(1, [](int) {
    set_shim("nccl", true);
    int version = 0;
    ASSERT_NCCL(ncclGetVersion(&version));
    EXPECT_EQ(version, 22899) << "the real library's";
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ncclComm_t comm = nullptr, other = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ASSERT_NCCL(ncclCommInitRankConfig(&comm, 3, id, 1, &config));
    ASSERT_NCCL(ncclCommInitRank(&other, 3, id, 2));
    int n = 0;
    EXPECT_NCCL(ncclCommCount(comm, &n));
    EXPECT_EQ(n, 3);
    EXPECT_NCCL(ncclCommUserRank(comm, &n));
    EXPECT_EQ(n, 1);
    unsigned char x[4] = {};
    EXPECT_NCCL(ncclAllReduce(x, x, 4, ncclUint8, ncclSum, comm, nullptr));
    EXPECT_EQ(x[3], 0xfa) << "the stand-in's mark";
    EXPECT_EQ(ncclTeamWorld(comm).stride, 77);
    EXPECT_STREQ(ncclGetLastError(comm), "fake last error");
    EXPECT_STREQ(ncclGetErrorString(ncclSuccess), "fake success");
    ncclResult_t state = ncclInProgress;
    EXPECT_NCCL(ncclCommGetAsyncError(comm, &state));

    // All other functions of the stand-in fail with ncclSystemError, which must come back unchanged.
    void* p = x;
    ncclWindow_t window = nullptr;
    ncclRedOp_t op = ncclSum;
    int excluded[1] = {0};
    uint64_t number = 0;
    const ncclCollConfig_t call = NCCL_COLLCONFIG_INITIALIZER;
    const ncclEncryptionConfig_t encryption = NCCL_ENCRYPTION_CONFIG_INITIALIZER;
    const auto other_window = reinterpret_cast<ncclWindow_t>(x);
    const std::map<std::string, ncclResult_t> results = {
        {"MemAlloc", ncclMemAlloc(&p, 8)},
        {"MemFree", ncclMemFree(x)},
        {"CommInitRankScalable", ncclCommInitRankScalable(&other, 3, 0, 1, &id, &config)},
        {"CommFinalize", ncclCommFinalize(comm)},
        {"CommRevoke", ncclCommRevoke(comm, 0)},
        {"CommSplit", ncclCommSplit(comm, 0, 0, &other, nullptr)},
        {"CommShrink", ncclCommShrink(comm, excluded, 1, &other, nullptr, 0)},
        {"CommCuDevice", ncclCommCuDevice(comm, &n)},
        {"CommRegister", ncclCommRegister(comm, x, 4, &p)},
        {"CommDeregister", ncclCommDeregister(comm, x)},
        {"CommWindowRegister", ncclCommWindowRegister(comm, x, 4, &window, 0)},
        {"CommWindowDeregister", ncclCommWindowDeregister(comm, reinterpret_cast<ncclWindow_t>(x))},
        {"RedOpCreatePreMulSum", ncclRedOpCreatePreMulSum(&op, x, ncclUint8, ncclScalarHostImmediate, comm)},
        {"RedOpDestroy", ncclRedOpDestroy(static_cast<ncclRedOp_t>(5), comm)},
        {"Reduce", ncclReduce(x, x, 1, ncclUint8, ncclSum, 0, comm, nullptr)},
        {"Broadcast", ncclBroadcast(x, x, 1, ncclUint8, 0, comm, nullptr)},
        {"ReduceScatter", ncclReduceScatter(x, x, 1, ncclUint8, ncclSum, comm, nullptr)},
        {"AllGather", ncclAllGather(x, x, 1, ncclUint8, comm, nullptr)},
        {"AlltoAll", ncclAlltoAll(x, x, 1, ncclUint8, comm, nullptr)},
        {"Gather", ncclGather(x, x, 1, ncclUint8, 0, comm, nullptr)},
        {"Scatter", ncclScatter(x, x, 1, ncclUint8, 0, comm, nullptr)},
        {"Send", ncclSend(x, 1, ncclUint8, 0, comm, nullptr)},
        {"Recv", ncclRecv(x, 1, ncclUint8, 0, comm, nullptr)},
        {"DevCommCreate", ncclDevCommCreate(comm, nullptr, nullptr)},
        {"DevCommDestroy", ncclDevCommDestroy(comm, nullptr)},
        {"GinBarrierCreateRequirement", ncclGinBarrierCreateRequirement(comm, {1, 0, 1}, 1, nullptr, nullptr)},
        {"LsaBarrierCreateRequirement", ncclLsaBarrierCreateRequirement({1, 0, 1}, 1, nullptr, nullptr)},
        {"LLA2ACreateRequirement", ncclLLA2ACreateRequirement(1, 1, nullptr, nullptr)},
        {"CommGetUniqueId", ncclCommGetUniqueId(comm, &id)},
        {"CommGrow", ncclCommGrow(comm, 4, &id, -1, &other, nullptr)},
        {"CommSuspend", ncclCommSuspend(comm, NCCL_SUSPEND_MEM)},
        {"CommResume", ncclCommResume(comm)},
        {"CommMemStats", ncclCommMemStats(comm, ncclStatGpuMemTotal, &number)},
        {"WinGetUserPtr", ncclWinGetUserPtr(comm, other_window, &p)},
        {"PutSignal", ncclPutSignal(x, 1, ncclUint8, 0, other_window, 0, 0, 0, 0, comm, nullptr)},
        {"Signal", ncclSignal(0, 0, 0, 0, comm, nullptr)},
        {"WaitSignal", ncclWaitSignal(0, nullptr, comm, nullptr)},
        {"ParamBind", ncclParamBind(nullptr, "x")},
        {"ParamGetI8", ncclParamGetI8(nullptr, nullptr)},
        {"ParamGetI16", ncclParamGetI16(nullptr, nullptr)},
        {"ParamGetI32", ncclParamGetI32(nullptr, nullptr)},
        {"ParamGetI64", ncclParamGetI64(nullptr, nullptr)},
        {"ParamGetU8", ncclParamGetU8(nullptr, nullptr)},
        {"ParamGetU16", ncclParamGetU16(nullptr, nullptr)},
        {"ParamGetU32", ncclParamGetU32(nullptr, nullptr)},
        {"ParamGetU64", ncclParamGetU64(nullptr, nullptr)},
        {"ParamGetStr", ncclParamGetStr(nullptr, nullptr)},
        {"ParamGet", ncclParamGet(nullptr, nullptr, 0, nullptr)},
        {"ParamGetParameter", ncclParamGetParameter("x", nullptr, nullptr)},
        {"ParamGetAllParameterKeys", ncclParamGetAllParameterKeys(nullptr, nullptr)},
        {"AllReduceConfig", ncclAllReduceConfig(x, x, 1, ncclUint8, ncclSum, comm, nullptr, &call)},
        {"ReduceConfig", ncclReduceConfig(x, x, 1, ncclUint8, ncclSum, 0, comm, nullptr, &call)},
        {"BroadcastConfig", ncclBroadcastConfig(x, x, 1, ncclUint8, 0, comm, nullptr, &call)},
        {"AllGatherConfig", ncclAllGatherConfig(x, x, 1, ncclUint8, comm, nullptr, &call)},
        {"ReduceScatterConfig", ncclReduceScatterConfig(x, x, 1, ncclUint8, ncclSum, comm, nullptr, &call)},
        {"AlltoAllConfig", ncclAlltoAllConfig(x, x, 1, ncclUint8, comm, nullptr, &call)},
        {"GatherConfig", ncclGatherConfig(x, x, 1, ncclUint8, 0, comm, nullptr, &call)},
        {"ScatterConfig", ncclScatterConfig(x, x, 1, ncclUint8, 0, comm, nullptr, &call)},
        {"SetEncryption", ncclSetEncryption(&encryption)},
        {"GetMultimemDeviceLeInfo", ncclGetMultimemDeviceLeInfo(other_window, 0, nullptr, nullptr)},
        {"GetCftDeviceLeInfo", ncclGetCftDeviceLeInfo(other_window, 0, 0, {1, 0, 1}, nullptr, nullptr)},
        {"GetPeerDeviceLeInfo", ncclGetPeerDeviceLeInfo(other_window, 0, 0, nullptr, nullptr)},
        {"CftBarrierCreateRequirement", ncclCftBarrierCreateRequirement({1, 0, 1}, 1, nullptr, nullptr)},
        {"CommQueryProperties", ncclCommQueryProperties(comm, nullptr)},
        {"GetLsaMultimemDevicePointer", ncclGetLsaMultimemDevicePointer(other_window, 0, &p)},
        {"GetMultimemDevicePointer", ncclGetMultimemDevicePointer(other_window, 0, {}, &p)},
        {"GetLsaDevicePointer", ncclGetLsaDevicePointer(other_window, 0, 0, &p)},
        {"GetPeerDevicePointer", ncclGetPeerDevicePointer(other_window, 0, 0, &p)},
        {"GinOutboxCreateRequirement", ncclGinOutboxCreateRequirement(1, 1, nullptr, nullptr)},
        {"GinInboxA2ACreateRequirement", ncclGinInboxA2ACreateRequirement({1, 0, 1}, 1, 1, nullptr, nullptr)},
    };
    for (const auto& [name, result] : results) {
      EXPECT_EQ(result, ncclSystemError) << name;
      EXPECT_EQ(fake_calls(name.c_str()), 1) << name;
    }
    EXPECT_STREQ(ncclGetLastError(nullptr), "fake last error") << "the last failure was NCCL's";
    // ncclBcast is forwarded as Broadcast.
    EXPECT_EQ(ncclBcast(x, 1, ncclUint8, 0, comm, nullptr), ncclSystemError);
    EXPECT_EQ(fake_calls("Broadcast"), 2);
    (void)ncclTeamCft(comm, NCCL_CFT_TEAM_FLAT), (void)ncclTeamCftMultimem(comm);
    (void)ncclTeamLsa(comm), (void)ncclTeamRail(comm), (void)ncclTeamRankToWorld(comm, {1, 0, 1}, 0);
    (void)ncclTeamRankToLsa(comm, {1, 0, 1}, 0), (void)ncclLLA2ACalcSlots(1, 1);
    for (const char* name :
         {"TeamLsa", "TeamRail", "TeamRankToWorld", "TeamRankToLsa", "LLA2ACalcSlots", "TeamCft", "TeamCftMultimem"}) {
      EXPECT_EQ(fake_calls(name), 1) << name;
    }
    // A group arrives as a group.
    const int before = fake_calls("AllReduce");
    EXPECT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclAllReduce(x, x, 4, ncclUint8, ncclSum, comm, nullptr));
    EXPECT_NCCL(ncclAllReduce(x, x, 4, ncclUint8, ncclSum, comm, nullptr));
    EXPECT_EQ(fake_calls("AllReduce"), before);
    EXPECT_NCCL(ncclGroupEnd());
    EXPECT_EQ(fake_calls("AllReduce"), before + 2);
    EXPECT_EQ(fake_calls("GroupStart"), 1);
    EXPECT_EQ(fake_calls("GroupEnd"), 1);
    EXPECT_NCCL(ncclCommDestroy(comm));
    EXPECT_EQ(fake_calls("CommDestroy"), 1);
  });
}

TEST(ShimForward, WhatNcclCallsByItsPublicNamesStaysItsOwn) {
  in_processes(1, [](int) {
    set_shim("nccl", true);
    ncclComm_t comms[2] = {};
    ASSERT_NCCL(ncclCommInitAll(comms, 2, nullptr));  // the stand-in calls ncclGetUniqueId and ncclCommInitRankConfig
    EXPECT_EQ(fake_calls("GetUniqueId"), 1);
    EXPECT_EQ(fake_calls("CommInitRankConfig"), 2);
    int rank = -1;
    EXPECT_NCCL(ncclCommUserRank(comms[1], &rank));
    EXPECT_EQ(rank, 1);
    for (ncclComm_t c : comms) EXPECT_NCCL(ncclCommDestroy(c));
  });
}

// One rank's user insists on NCCL: all ranks forward, although the id came from a rank that would not have.
TEST(ShimForward, AllRanksForwardWhenOneMust) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    set_shim(rank == 2 ? "nccl" : "auto", true);
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 3, meet(*board, rank), rank));
    EXPECT_EQ(fake_calls("CommInitRankConfig"), 1);
    EXPECT_EQ(fake_calls("GetUniqueId"), rank == 0 ? 1 : 0);
    unsigned char x[2] = {};
    EXPECT_NCCL(ncclAllReduce(x, x, 2, ncclUint8, ncclSum, comm, nullptr));
    EXPECT_EQ(x[1], 0xfa);
    int n = 0;
    EXPECT_NCCL(ncclCommCount(comm, &n));
    EXPECT_EQ(n, 3);
    EXPECT_STREQ(ncclGetLastError(comm), "fake last error");
    EXPECT_NCCL(ncclCommDestroy(comm));
    EXPECT_EQ(fake_calls("CommDestroy"), 1);
  });
}

TEST(ShimForward, AnAbortEndsAHandOverThatNcclDoesNotFinish) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    set_shim(rank == 1 ? "nccl" : "auto", true);
    setenv("FAKE_NCCL_NEVER_READY", "1", 1);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr;
    ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, meet(*board, rank), rank, &config), ncclInProgress);
    const auto within = [](const char* name) {
      for (int ms = 0; ms < 10'000 && fake_calls(name) == 0; ++ms) usleep(1000);
      return fake_calls(name) > 0;
    };
    EXPECT_TRUE(within("CommGetAsyncError")) << "NCCL is not making it yet";
    EXPECT_NCCL(ncclCommAbort(comm));
    EXPECT_TRUE(within("CommAbort"));
  });
}

// Rank 0 makes a second communicator in the group, which fails once NCCL has begun to make the first.
TEST(ShimForward, AFailureInItsGroupEndsAHandOverThatNcclDoesNotFinish) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    alarm(20);
    set_shim(rank == 1 ? "nccl" : "auto", true);
    setenv("FAKE_NCCL_NEVER_READY", "1", 1);
    const ncclUniqueId id = meet(*board, rank);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = rank == 0;
    ncclComm_t comm = nullptr;
    if (rank == 1) {
      ASSERT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank, &config), ncclInProgress);
      while (board->counters[0].load() == 0) usleep(1000);
      EXPECT_NCCL(ncclCommAbort(comm));
      return;
    }
    ncclUniqueId second;
    ncclComm_t failing = nullptr, twice = nullptr;
    ASSERT_NCCL(ncclGetUniqueId(&second));
    std::thread other([&] {
      while (fake_calls("CommGetAsyncError") == 0) usleep(1000);
      EXPECT_NE(ncclCommInitRank(&twice, 2, second, 0), ncclSuccess) << "rank 0 has joined";
    });
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclCommInitRankConfig(&comm, 2, id, rank, &config));
    EXPECT_NCCL(ncclCommInitRank(&failing, 2, second, 0));
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    const std::string why = ncclGetLastError(nullptr);
    EXPECT_NE(why.find("joined twice"), std::string::npos) << why;
    EXPECT_EQ(fake_calls("CommAbort"), 1);
    EXPECT_EQ(comm, nullptr);
    board->counters[0].store(1);
    other.join();
  });
}

TEST(ShimForward, OneRankWithoutNcclIsNamedByAll) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    set_shim(rank == 2 ? "nccl" : "auto", rank != 1);
    ncclComm_t comm = nullptr;
    EXPECT_EQ(ncclCommInitRank(&comm, 3, meet(*board, rank), rank), ncclInvalidUsage);
    EXPECT_EQ(comm, nullptr);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("rank 1 finds none"), std::string::npos)
        << ncclGetLastError(nullptr);
    const bool reason = std::string(ncclGetLastError(nullptr)).find("/nonexistent/libnccl.so.2") != std::string::npos;
    EXPECT_EQ(reason, rank == 1) << ncclGetLastError(nullptr);
  });
}

void use_device() { setenv("MOECCL_CUDA_DRIVER", std::getenv("MOECCL_TEST_FAKE_CUDA"), 1); }

void* open_driver() { return dlopen(std::getenv("MOECCL_CUDA_DRIVER"), RTLD_NOW); }
// What a program does that chooses its device.
void initialise_device() { ASSERT_EQ(reinterpret_cast<int (*)(unsigned)>(dlsym(open_driver(), "cuInit"))(0), 0); }

// Programs call by the version what NCCL then has to serve.
TEST(ShimForward, TheVersionIsThatOfTheNcclThatWillServe) {
  for (const char* most : {"", "2.28.3", "2.30.7"}) {
    in_processes(1, [most](int) {
      set_shim("auto", true);
      if (*most != '\0') setenv("MOECCL_SHIM_VERSION", most, 1);
      use_device();
      const int said = *most == '\0' ? NCCL_VERSION_CODE : std::string(most) == "2.28.3" ? 22803 : 23007;
      int version = 0;
      ASSERT_NCCL(ncclGetVersion(&version));
      EXPECT_EQ(version, said);
      void *const driver = open_driver(), *context = nullptr;
      EXPECT_EQ(reinterpret_cast<int (*)(void**)>(dlsym(driver, "cuCtxGetCurrent"))(&context), 3)
          << "a program that asks for the version could not use CUDA in its children";
      initialise_device();
      ASSERT_NCCL(ncclGetVersion(&version));
      EXPECT_EQ(version, std::string(most) == "2.28.3" ? 22803 : 22899) << most;
    });
  }
}

// Each rank has a device that this MoECCL cannot use, so the whole job goes to NCCL, with an id made by NCCL. A program
// that has not used the device may fork next, so its id is MoECCL's, and the ranks agree once they have met.
TEST(ShimForward, JobsWithMemoryThatMoecclCannotServeGoToNccl) {
  for (const bool used : {true, false}) {
    Board* board = new_board();
    in_processes(2, [&](int rank) {
      set_shim("auto", true);
      use_device();
      if (used) initialise_device();
      const ncclUniqueId id = meet(*board, rank);
      EXPECT_EQ(id.internal[0] == 'f', used);
      ncclComm_t comm = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, 2, id, rank));
      EXPECT_EQ(fake_calls(used ? "CommInitRank" : "CommInitRankConfig"), 1);
      void* p = nullptr;
      EXPECT_EQ(ncclMemAlloc(&p, 8), ncclSystemError) << "the stand-in's answer";
      EXPECT_EQ(fake_calls("MemAlloc"), 1);
      EXPECT_NCCL(ncclCommDestroy(comm));
    });
  }
}

// The same where only rank 1 has a device: rank 0's id is MoECCL's, and the ranks agree once they have met.
TEST(ShimForward, OneRankWithADeviceIsEnough) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    set_shim("auto", true);
    if (rank == 1) use_device();
    const ncclUniqueId id = meet(*board, rank);
    EXPECT_NE(id.internal[0], 'f');
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 3, id, rank));
    EXPECT_EQ(fake_calls("CommInitRankConfig"), 1);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimForward, DeviceMemoryWithoutNcclIsAnErrorAndNoCrash) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    set_shim("auto", false);
    use_device();
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    float x = 1;
    EXPECT_NCCL(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, nullptr));
    EXPECT_EQ(x, 2) << "host memory is served";
    void* cuda = dlopen(std::getenv("MOECCL_TEST_FAKE_CUDA"), RTLD_NOW);
    auto* allocate = reinterpret_cast<int (*)(uint64_t*, size_t)>(dlsym(cuda, "cuMemAlloc_v2"));
    uint64_t address = 0;
    ASSERT_EQ(allocate(&address, 64), 0);
    EXPECT_EQ(ncclAllReduce(&x, reinterpret_cast<void*>(address), 1, ncclFloat32, ncclSum, comm, nullptr),
              ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("memory of a CUDA device"), std::string::npos)
        << ncclGetLastError(comm);
    void* p = nullptr;
    EXPECT_EQ(ncclMemAlloc(&p, 8), ncclInvalidUsage) << "host memory is not what a CUDA program asks for";
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// A CUDA driver crashes when it gets a handle of MoECCL's.
TEST(ShimForward, AStreamOfMoecclsIsNotGivenToCuda) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    set_shim("auto", false);
    use_device();
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    const HostStream stream;
    float x = 1, y = 0;
    ASSERT_NCCL(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, stream.get()));
    EXPECT_NCCL(ncclSignal(1 - rank, 0, 0, 0, comm, stream.get()));
    EXPECT_EQ(y, 2) << "the signal waits for its stream";
    ncclWaitSignalDesc_t wanted = {1, 1 - rank, 0, 0};
    EXPECT_NCCL(ncclWaitSignal(1, &wanted, comm, stream.get()));
    ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
    config.launchCompletionEvent = reinterpret_cast<cudaEvent_t>(&x);
    EXPECT_EQ(ncclAllReduceConfig(&x, &y, 1, ncclFloat32, ncclSum, comm, stream.get(), &config), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("a CUDA stream"), std::string::npos)
        << ncclGetLastError(nullptr);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimForward, WithoutNcclTheErrorSaysWhatToDo) {
  in_processes(1, [](int) {
    set_shim("moeccl", false);
    ncclComm_t comm = nullptr;
    ncclUniqueId real;
    memset(&real, 'f', sizeof real);
    EXPECT_EQ(ncclCommInitRank(&comm, 1, real, 0), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("MOECCL_SHIM_NCCL"), std::string::npos)
        << ncclGetLastError(nullptr);
    EXPECT_EQ(ncclLLA2ACreateRequirement(1, 1, nullptr, nullptr), ncclInvalidUsage);
  });
}

// Both kinds work in one program and one group, and each call goes to its own library.
TEST(ShimForward, CommunicatorsOfBothKindsLiveSideBySide) {
  in_processes(1, [](int) {
    set_shim("moeccl", true);
    ncclComm_t ours = nullptr, real = nullptr;
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclCommInitRank(&ours, 1, id, 0));
    memset(&id, 'f', sizeof id);  // an id that NCCL made elsewhere
    ASSERT_NCCL(ncclCommInitRank(&real, 1, id, 0));
    unsigned char a[2] = {1, 2}, b[2] = {}, c[2] = {};
    ASSERT_NCCL(ncclGroupStart());
    ASSERT_NCCL(ncclAllReduce(a, b, 2, ncclUint8, ncclSum, ours, nullptr));
    ASSERT_NCCL(ncclAllReduce(a, c, 2, ncclUint8, ncclSum, real, nullptr));
    ASSERT_NCCL(ncclGroupEnd());
    EXPECT_EQ(b[1], 2);
    EXPECT_EQ(c[1], 0xfa);
    EXPECT_NCCL(ncclCommDestroy(real));
    EXPECT_NCCL(ncclCommAbort(ours));
    EXPECT_EQ(fake_calls("CommDestroy"), 1);
    EXPECT_EQ(fake_calls("CommAbort"), 0);
  });
}

}  // namespace
}  // namespace moeccl::testing
