// SPDX-License-Identifier: Apache-2.0
// Communicators of an NCCL program under the shim: all ways to create them, loss of ranks, operators, errors.
#include <signal.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

// Expects that the ranks of comm are exactly those whose bits are set.
void expect_ranks(ncclComm_t comm, int n, int32_t bit, int32_t bits) {
  int count = 0;
  ASSERT_NCCL(ncclCommCount(comm, &count));
  EXPECT_EQ(count, n);
  int32_t sum = 0;
  ASSERT_NCCL(ncclAllReduce(&bit, &sum, 1, ncclInt32, ncclSum, comm, nullptr));
  EXPECT_EQ(sum, bits);
}

TEST(ShimComm, OneThreadMakesAllRanksInAGroup) {
  in_processes(1, [](int) {
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.commName = "grouped";
    ncclComm_t comms[3] = {};
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < 3; ++r) ASSERT_NCCL(ncclCommInitRankConfig(&comms[r], 3, id, r, &config));
    EXPECT_EQ(ncclAllReduce(&id, &id, 1, ncclUint8, ncclSum, comms[0], nullptr), ncclInvalidArgument)
        << "a communicator of an open group is not there yet";
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(comms[0], nullptr) << "the group failed as a whole";

    // Nor does it wait for a rank whose config is wrong.
    ncclConfig_t wrong = config;
    wrong.blocking = 2;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < 2; ++r) ASSERT_NCCL(ncclCommInitRankConfig(&comms[r], 3, id, r, &config));
    EXPECT_EQ(ncclCommInitRankConfig(&comms[2], 3, id, 2, &wrong), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
    EXPECT_EQ(comms[0], nullptr);

    ASSERT_NCCL(ncclGetUniqueId(&id));
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < 3; ++r) ASSERT_NCCL(ncclCommInitRankConfig(&comms[r], 3, id, r, &config));
    ASSERT_NCCL(ncclGroupEnd());
    // One group may also split several communicators: 0 and 2 together, 1 joins none.
    ncclComm_t parts[3] = {comms[0], comms[0], comms[0]};
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < 3; ++r) {
      ASSERT_NCCL(ncclCommSplit(comms[r], r == 1 ? NCCL_SPLIT_NOCOLOR : 5, -r, &parts[r], nullptr));
    }
    ASSERT_NCCL(ncclGroupEnd());
    EXPECT_EQ(parts[1], nullptr);
    ncclComm_t none = nullptr;
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_EQ(ncclCommSplit(comms[0], -7, 0, &none, nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    int rank = -1;
    EXPECT_NCCL(ncclCommUserRank(parts[2], &rank));
    EXPECT_EQ(rank, 0) << "ordered by key";
    for (ncclComm_t c : {parts[0], parts[2], comms[0], comms[1], comms[2]}) EXPECT_NCCL(ncclCommDestroy(c));
  });
}

// As with NCCL, a program that polls the parent, like PyTorch, continues only when the split is complete on this rank.
TEST(ShimComm, ASplitInTheBackgroundHoldsItsParent) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nonblocking(2, meet(*board, rank), rank), half = nullptr;
    while (rank == 1 && board->counters[0].load() == 0) usleep(1000);
    EXPECT_EQ(ncclCommSplit(comm, rank == 1 ? NCCL_SPLIT_NOCOLOR : 0, 0, &half, nullptr), ncclInProgress);
    EXPECT_EQ(half == nullptr, rank == 1) << "which joins none";
    ncclResult_t state = ncclSuccess;
    if (rank == 0) {
      EXPECT_NCCL(ncclCommGetAsyncError(comm, &state));
      EXPECT_EQ(state, ncclInProgress);
      int32_t one = 1;
      EXPECT_EQ(ncclAllReduce(&one, &one, 1, ncclInt32, ncclSum, comm, nullptr), ncclInvalidArgument);
      board->counters[0].store(1);
    }
    do {
      EXPECT_NCCL(ncclCommGetAsyncError(comm, &state));
      usleep(1000);
    } while (state == ncclInProgress);
    expect_ranks(comm, 2, 1 << rank, 3);
    if (rank == 0) {
      do EXPECT_NCCL(ncclCommGetAsyncError(half, &state));
      while (state == ncclInProgress);
      expect_ranks(half, 1, 1, 1);
      EXPECT_NCCL(ncclCommDestroy(half));
    }
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// The flag of the new communicator's config says only how that one is used.
TEST(ShimComm, ASplitAndAShrinkBlockIfTheirParentDoes) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t parents[2] = {nonblocking(3, meet(*board, rank), rank), nullptr};
    config.blocking = 1;
    EXPECT_EQ(ncclCommSplit(parents[0], 0, rank, &parents[1], &config), ncclInProgress);
    for (const ncclComm_t c : {parents[0], parents[1]}) ASSERT_EQ(wait_ready(c), ncclSuccess);
    for (const int blocking : {0, 1}) {
      const ncclComm_t parent = parents[blocking];
      const ncclResult_t result = blocking != 0 ? ncclSuccess : ncclInProgress;
      config.blocking = 1 - blocking;
      ncclComm_t parts[3] = {};
      EXPECT_EQ(ncclCommSplit(parent, 0, rank, &parts[0], &config), result);
      EXPECT_EQ(wait_ready(parent), ncclSuccess);
      ASSERT_NCCL(ncclGroupStart());
      ASSERT_NCCL(ncclCommSplit(parent, 0, rank, &parts[1], &config));
      EXPECT_EQ(ncclGroupEnd(), result);
      EXPECT_EQ(wait_ready(parent), ncclSuccess);
      int excluded = 2;
      if (rank != excluded) {
        EXPECT_EQ(ncclCommShrink(parent, &excluded, 1, &parts[2], &config, NCCL_SHRINK_DEFAULT), result);
        EXPECT_EQ(wait_ready(parts[2]), ncclSuccess);
        expect_ranks(parts[2], 2, 1 << rank, 0b011);
      }
      expect_ranks(parts[1], 3, 1 << rank, 0b111);
      for (const ncclComm_t part : parts) EXPECT_NCCL(ncclCommDestroy(part));
    }
    for (const ncclComm_t c : {parents[1], parents[0]}) EXPECT_NCCL(ncclCommDestroy(c));
  });
}

// The job of the split uses its parent until the group ends, which is after the call that ends the parent.
TEST(ShimComm, AParentEndedInTheGroupOfItsSplitIsNotAwaited) {
  Board* board = new_board();
  in_processes(1, [&](int rank) {
    for (const bool abort : {true, false}) {
      ncclComm_t comm = nullptr, part = nullptr;
      ASSERT_NCCL(ncclCommInitRank(&comm, 1, meet(*board, rank), rank));
      ASSERT_NCCL(ncclGroupStart());
      ASSERT_NCCL(ncclCommSplit(comm, 0, 0, &part, nullptr));
      ASSERT_NCCL(abort ? ncclCommAbort(comm) : ncclCommDestroy(comm));
      EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
      EXPECT_EQ(part, nullptr);
    }
  });
}

TEST(ShimComm, ScalableInitAndSplit) {
  Board* board = new_board();
  in_processes(4, [&](int rank) {
    ncclUniqueId ids[2] = {meet(*board, rank)};
    ids[1] = ids[0];
    ncclComm_t comm = nullptr, half = nullptr;
    EXPECT_EQ(ncclCommInitRankScalable(&comm, 4, rank, 5, ids, nullptr), ncclInvalidArgument);  // as NCCL says
    ASSERT_NCCL(ncclCommInitRankScalable(&comm, 4, rank, 2, ids, nullptr));
    expect_ranks(comm, 4, 1 << rank, 0b1111);
    ASSERT_NCCL(ncclCommSplit(comm, rank % 2, 0, &half, nullptr));
    expect_ranks(half, 2, 1 << rank, rank % 2 == 0 ? 0b0101 : 0b1010);
    EXPECT_EQ(ncclCommSplit(comm, -7, 0, &half, nullptr), ncclInvalidArgument);
    EXPECT_EQ(half, nullptr);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimComm, NonBlockingInitIsPolled) {
  in_processes(1, [](int) {
    // One thread, two ranks and no group: with blocking calls, the first would wait for the second for ever.
    ncclUniqueId id;
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comms[2] = {};
    for (int r = 0; r < 2; ++r) ASSERT_EQ(ncclCommInitRankConfig(&comms[r], 2, id, r, &config), ncclInProgress);
    for (ncclComm_t c : comms) {
      ncclResult_t state = ncclInProgress;
      while (state == ncclInProgress) {
        ASSERT_NCCL(ncclCommGetAsyncError(c, &state));
        usleep(1000);
      }
      ASSERT_EQ(state, ncclSuccess) << ncclGetLastError(c);
    }
    int32_t in[2] = {1, 2}, out[2] = {};
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < 2; ++r) ASSERT_NCCL(ncclAllReduce(&in[r], &out[r], 1, ncclInt32, ncclSum, comms[r], nullptr));
    ASSERT_NCCL(ncclGroupEnd());
    EXPECT_EQ(out[0] + out[1], 6);
    for (ncclComm_t c : comms) EXPECT_NCCL(ncclCommDestroy(c));

    // An abort returns at once while the communicator waits for a rank that never comes.
    ASSERT_NCCL(ncclGetUniqueId(&id));
    ncclComm_t alone = nullptr;
    ASSERT_EQ(ncclCommInitRankConfig(&alone, 2, id, 0, &config), ncclInProgress);
    EXPECT_NCCL(ncclCommAbort(alone));
  });
}

TEST(ShimComm, ShrinkLeavesTheExcludedOut) {
  Board* board = new_board();
  in_processes(4, [&](int rank) {
    ncclComm_t comm = nullptr, rest = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 4, meet(*board, rank), rank));
    int excluded[1] = {1};
    if (rank != 1) {
      for (int twice = 0; twice < 2; ++twice) {
        ASSERT_NCCL(ncclCommShrink(comm, excluded, 1, &rest, nullptr, NCCL_SHRINK_DEFAULT));
        expect_ranks(rest, 3, 1 << rank, 0b1101);
        EXPECT_NCCL(ncclCommDestroy(rest));
      }
    } else {
      EXPECT_EQ(ncclCommShrink(comm, excluded, 1, &rest, nullptr, NCCL_SHRINK_DEFAULT), ncclInvalidArgument);
    }
    // The parent still works on all ranks.
    expect_ranks(comm, 4, 1 << rank, 0b1111);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimComm, SurvivorsOfAKilledRankShrinkAndGoOn) {
  Board* board = new_board();
  const auto work = [&](int rank) {
    ncclComm_t comm = nullptr, rest = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 4, meet(*board, rank), rank));
    expect_ranks(comm, 4, 1 << rank, 0b1111);
    if (rank == 2) raise(SIGKILL);
    int32_t n = 1;
    EXPECT_EQ(ncclAllReduce(&n, &n, 1, ncclInt32, ncclSum, comm, nullptr), ncclRemoteError);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("rank 2"), std::string::npos) << ncclGetLastError(comm);
    ncclResult_t state = ncclSuccess;
    EXPECT_NCCL(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclRemoteError);
    int excluded[1] = {2};
    ASSERT_NCCL(ncclCommShrink(comm, excluded, 1, &rest, nullptr, NCCL_SHRINK_ABORT));
    expect_ranks(rest, 3, 1 << rank, 0b1011);
    EXPECT_NCCL(ncclCommAbort(comm));
    EXPECT_NCCL(ncclCommDestroy(rest));
  };
  in_processes(4, work, {2});
}

TEST(ShimComm, ARevokedCommunicatorCanBeSplit) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    ncclComm_t comm = nullptr, part = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 3, meet(*board, rank), rank));
    EXPECT_NCCL(ncclCommRevoke(nullptr, NCCL_REVOKE_DEFAULT));
    ASSERT_NCCL(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    EXPECT_EQ(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT), ncclInvalidArgument) << "twice";
    ncclResult_t state = ncclInProgress;
    ASSERT_NCCL(ncclCommGetAsyncError(comm, &state));
    EXPECT_EQ(state, ncclSuccess) << "quiescent";
    int32_t n = 1;
    EXPECT_EQ(ncclAllReduce(&n, &n, 1, ncclInt32, ncclSum, comm, nullptr), ncclInvalidUsage);
    EXPECT_EQ(ncclCommFinalize(comm), ncclInvalidArgument);
    ASSERT_NCCL(ncclCommSplit(comm, rank == 0 ? 0 : 1, 0, &part, nullptr));
    expect_ranks(part, rank == 0 ? 1 : 2, 1 << rank, rank == 0 ? 0b001 : 0b110);
    EXPECT_NCCL(ncclCommDestroy(part));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// The revocation reaches a rank in its next call; both must then split by the same way.
TEST(ShimComm, ARankThatAnotherHasRevokedSplitsAsTheOtherDoes) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr, part = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    int32_t n = 1;
    if (rank == 0) {
      ASSERT_NCCL(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    } else {
      EXPECT_EQ(ncclAllReduce(&n, &n, 1, ncclInt32, ncclSum, comm, nullptr), ncclInvalidUsage);
    }
    ASSERT_NCCL(ncclCommSplit(comm, 0, 0, &part, nullptr));
    expect_ranks(part, 2, 1 << rank, 0b11);
    EXPECT_NCCL(ncclCommDestroy(part));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// It is revoked while rank 1 waits in its split for rank 0, which then splits.
TEST(ShimComm, ASplitThatARevocationInterruptsMeetsTheOthersSplit) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr, part = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    if (rank == 0) {
      while (board->counters[0].load() == 0) usleep(1000);
      usleep(200'000);
      ASSERT_NCCL(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    }
    board->counters[0].store(1);
    ASSERT_NCCL(ncclCommSplit(comm, 0, -rank, &part, nullptr));
    expect_ranks(part, 2, 1 << rank, 0b11);
    int place = -1;
    EXPECT_NCCL(ncclCommUserRank(part, &place));
    EXPECT_EQ(place, 1 - rank);
    EXPECT_NCCL(ncclCommDestroy(part));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// Both splits use the parent, which ranks must do in the same order.
TEST(ShimComm, TwoSplitsOfOneParentInAGroup) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    ncclComm_t comms[2] = {nonblocking(3, meet(*board, rank), rank), nullptr};
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    EXPECT_EQ(ncclCommSplit(comms[0], 0, rank, &comms[1], &config), ncclInProgress);
    for (const ncclComm_t comm : comms) ASSERT_EQ(wait_ready(comm), ncclSuccess);
    for (const int blocking : {1, 0}) {
      const ncclComm_t comm = comms[blocking];
      for (int round = 0; round < 5; ++round) {
        ncclComm_t odd = nullptr, upper = nullptr;
        ASSERT_NCCL(ncclGroupStart());
        ASSERT_NCCL(ncclCommSplit(comm, rank % 2, 0, &odd, nullptr));
        ASSERT_NCCL(ncclCommSplit(comm, rank / 2, 0, &upper, nullptr));
        ASSERT_EQ(ncclGroupEnd(), blocking != 0 ? ncclSuccess : ncclInProgress) << ncclGetLastError(nullptr);
        for (const ncclComm_t each : {odd, upper, comm}) ASSERT_EQ(wait_ready(each), ncclSuccess);
        expect_ranks(odd, rank % 2 == 0 ? 2 : 1, 1 << rank, rank % 2 == 0 ? 0b101 : 0b010);
        expect_ranks(upper, rank < 2 ? 2 : 1, 1 << rank, rank < 2 ? 0b011 : 0b100);
        EXPECT_NCCL(ncclCommDestroy(odd));
        EXPECT_NCCL(ncclCommDestroy(upper));
      }
    }
    for (const ncclComm_t comm : {comms[1], comms[0]}) EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimComm, AGroupsCallsComeBeforeASplitInTheBackground) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nonblocking(2, meet(*board, rank), rank), part = nullptr;
    int32_t sum = 1;
    ASSERT_NCCL(ncclGroupStart());
    ASSERT_NCCL(ncclAllReduce(&sum, &sum, 1, ncclInt32, ncclSum, comm, nullptr));
    ASSERT_NCCL(ncclCommSplit(comm, 0, 0, &part, nullptr));
    EXPECT_EQ(ncclGroupEnd(), ncclInProgress) << ncclGetLastError(nullptr);
    EXPECT_EQ(sum, 2);
    EXPECT_EQ(wait_ready(part), ncclSuccess);
    expect_ranks(part, 2, 1 << rank, 0b11);
    EXPECT_NCCL(ncclCommDestroy(part));
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// The thread that asks is another than the one that called.
TEST(ShimComm, AWatchdogGetsTheTextOfAStreamsFailure) {
  Board* board = new_board();
  const auto work = [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    if (rank == 1) {
      while (board->counters[0].load() == 0) usleep(1000);
      kill(getpid(), SIGKILL);
    }
    const HostStream stream;
    float x = 1, y = 0;
    ASSERT_NCCL(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, stream.get()));
    board->counters[0].store(1);
    std::thread watchdog([&] {
      ncclResult_t state = ncclSuccess;
      while (ncclCommGetAsyncError(comm, &state) == ncclSuccess && state == ncclSuccess) usleep(1000);
      EXPECT_EQ(state, ncclRemoteError);
      EXPECT_NE(std::string(ncclGetLastError(comm)).find("rank 1"), std::string::npos) << ncclGetLastError(comm);
    });
    watchdog.join();
    EXPECT_NCCL(ncclCommAbort(comm));
  };
  in_processes(2, work, {1});
}

TEST(ShimComm, ScalarsAreReadWhenTheirResidenceSays) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    float scalar = 2, late = 2;
    ncclRedOp_t at_once = ncclSum, when_run = ncclSum;
    ASSERT_NCCL(ncclRedOpCreatePreMulSum(&at_once, &scalar, ncclFloat32, ncclScalarHostImmediate, comm));
    ASSERT_NCCL(ncclRedOpCreatePreMulSum(&when_run, &late, ncclFloat32, ncclScalarDevice, comm));
    EXPECT_NE(at_once, when_run);
    scalar = late = 10;
    const float x = static_cast<float>(rank + 1);
    float y = 0, z = 0;
    // Both operators are destroyed before the group that uses them ends, which NCCL allows.
    ASSERT_NCCL(ncclGroupStart());
    ASSERT_NCCL(ncclAllReduce(&x, &y, 1, ncclFloat32, at_once, comm, nullptr));
    ASSERT_NCCL(ncclAllReduce(&x, &z, 1, ncclFloat32, when_run, comm, nullptr));
    EXPECT_NCCL(ncclRedOpDestroy(at_once, comm));
    EXPECT_NCCL(ncclRedOpDestroy(when_run, comm));
    ASSERT_NCCL(ncclGroupEnd());
    EXPECT_EQ(y, 6);
    EXPECT_EQ(z, 30);
    EXPECT_EQ(ncclRedOpDestroy(at_once, comm), ncclInvalidArgument);
    EXPECT_EQ(ncclAllReduce(&x, &y, 1, ncclFloat32, at_once, comm, nullptr), ncclInvalidArgument);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimComm, ASimulatedGroupRunsNothing) {
  in_processes(1, [](int) {
    ncclComm_t comms[2];
    ASSERT_NCCL(ncclCommInitAll(comms, 2, nullptr));
    std::vector<float> in(1 << 16, 1), out(1 << 16, 7);
    ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
    ASSERT_NCCL(ncclGroupStart());
    for (ncclComm_t c : comms) {
      ASSERT_NCCL(ncclAllReduce(in.data(), out.data(), in.size(), ncclFloat32, ncclSum, c, nullptr));
    }
    ASSERT_NCCL(ncclGroupSimulateEnd(&info));
    EXPECT_GT(info.estimatedTime, 0) << "MoECCL's prediction in microseconds";
    EXPECT_EQ(out[0], 7);
    for (ncclComm_t c : comms) EXPECT_NCCL(ncclCommDestroy(c));
  });
}

TEST(ShimComm, ASimulatedGroupWithoutItsInfoEndsTheGroup) {
  in_processes(1, [](int) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitAll(&comm, 1, nullptr));
    ncclSimInfo_t raw = {};
    for (ncclSimInfo_t* info : {static_cast<ncclSimInfo_t*>(nullptr), &raw}) {
      float x = 1, y = 7;
      ASSERT_NCCL(ncclGroupStart());
      ASSERT_NCCL(ncclAllReduce(&x, &y, 1, ncclFloat32, ncclSum, comm, nullptr));
      EXPECT_EQ(ncclGroupSimulateEnd(info), ncclInvalidArgument);
      EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage) << "no group is open";
      EXPECT_EQ(y, 7);
    }
    EXPECT_EQ(ncclGroupSimulateEnd(nullptr), ncclInvalidUsage);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

TEST(ShimComm, ACommunicatorIsFinalizedOnce) {
  in_processes(1, [](int) {
    EXPECT_NCCL(ncclCommFinalize(nullptr));
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitAll(&comm, 1, nullptr));
    EXPECT_NCCL(ncclCommFinalize(comm));
    EXPECT_EQ(ncclCommFinalize(comm), ncclInvalidArgument);
    EXPECT_EQ(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT), ncclInvalidArgument);
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// Returns what a failed call writes to stderr, in a process with these variables.
std::string said_with(const std::string& debug, const std::string& file) {
  const std::string out = "/tmp/moeccl-shim-debug-" + std::to_string(getpid());
  in_processes(1, [&](int) {
    unsetenv("NCCL_DEBUG");
    if (!debug.empty()) setenv("NCCL_DEBUG", debug.c_str(), 1);
    if (!file.empty()) setenv("NCCL_CONF_FILE", file.c_str(), 1);
    ASSERT_NE(freopen(out.c_str(), "w", stderr), nullptr);
    int number = 0;
    (void)ncclCommDestroy(reinterpret_cast<ncclComm_t>(&number));
  });
  std::ifstream in(out);
  const std::string text((std::istreambuf_iterator<char>(in)), {});
  unlink(out.c_str());
  return text;
}

TEST(ShimComm, NcclDebugMayBeWrittenAnyhowAndAnywhere) {
  const std::string file = "/tmp/moeccl-shim-conf-" + std::to_string(getpid());
  std::ofstream(file) << "# a comment\nNCCL_DEBUG=warn\n";
  const char* const said = "not a live communicator";
  EXPECT_EQ(said_with("", "/dev/null").find(said), std::string::npos);
  EXPECT_NE(said_with("Info", "/dev/null").find(said), std::string::npos);
  EXPECT_NE(said_with("", file).find(said), std::string::npos);
  EXPECT_EQ(said_with("none", file).find(said), std::string::npos) << "the environment counts first";
  unlink(file.c_str());
}

TEST(ShimComm, MistakesAreNamed) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidUsage);
    EXPECT_EQ(ncclCommInitAll(nullptr, 1, nullptr), ncclInvalidArgument);
    int n = 0;
    EXPECT_EQ(ncclCommCount(nullptr, &n), ncclInvalidArgument);
    EXPECT_EQ(ncclCommCount(reinterpret_cast<ncclComm_t>(&n), &n), ncclInvalidArgument);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("ncclCommCount"), std::string::npos);
    ncclComm_t comm = nullptr;
    ncclConfig_t raw = {};
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, meet(*board, rank), rank, &raw), ncclInvalidArgument);
    EXPECT_NE(std::string(ncclGetLastError(nullptr)).find("NCCL_CONFIG_INITIALIZER"), std::string::npos);
    EXPECT_EQ(ncclCommInitRank(&comm, 2, board->id, 2), ncclInvalidArgument);
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, board->id, rank));
    float x[4] = {};
    const ncclDataType_t no_type = ncclNumTypes;
    EXPECT_EQ(ncclAllReduce(x, x + 2, 2, no_type, ncclSum, comm, nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclBroadcast(x, x, 1, ncclFloat32, 5, comm, nullptr), ncclInvalidArgument);
    // A wrong call makes its group fail, and no part of the group runs.
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclAllReduce(x, x, 2, ncclFloat32, ncclSum, comm, nullptr));
    EXPECT_EQ(ncclAllReduce(x, x, 2, ncclFloat32, ncclSum, nullptr, nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    ncclRedOp_t gone = ncclSum;
    ASSERT_NCCL(ncclRedOpCreatePreMulSum(&gone, x, ncclFloat32, ncclScalarHostImmediate, comm));
    EXPECT_NCCL(ncclRedOpDestroy(gone, comm));
    float before = 1, after = 7;
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclAllReduce(&before, &after, 1, ncclFloat32, ncclSum, comm, nullptr));
    (void)ncclAllReduce(x, x, 2, ncclFloat32, gone, comm, nullptr);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(after, 7);
    ncclTeam_t world = ncclTeamWorld(comm);
    EXPECT_EQ(world.nRanks, 2);
    EXPECT_EQ(world.rank, rank);
    EXPECT_EQ(ncclDevCommCreate(comm, nullptr, nullptr), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("MOECCL_SHIM_MODE=nccl"), std::string::npos);
    EXPECT_STREQ(ncclGetErrorString(ncclSuccess), "no error");
    // Different sizes are named, with the same class of error on both ranks.
    float y[4] = {};
    EXPECT_EQ(ncclAllReduce(x, y, rank == 0 ? 3 : 4, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidUsage);
    EXPECT_NE(std::string(ncclGetLastError(comm)).find("Mismatch"), std::string::npos) << ncclGetLastError(comm);
    EXPECT_NCCL(ncclCommAbort(comm));
  });
}

}  // namespace
}  // namespace moeccl::testing
