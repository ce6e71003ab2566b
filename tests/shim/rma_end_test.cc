// SPDX-License-Identifier: Apache-2.0
// How waits for puts and signals end when nothing comes: by the deadline, by the end of the peer, or by that of the
// communicator on either side.
#include <signal.h>

#include <functional>
#include <string>

#include "tests/shim/rma_ranks.h"

namespace moeccl::testing {
namespace {

TEST(ShimRmaEnd, APeerThatNeverFetchesIsNamed) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    forbid_writing();
    setenv("MOECCL_TIMEOUT_MS", "2000", 1);
    WithWindow w(*board, 2, rank, 16);
    if (rank == 0) {
      const unsigned char byte = 3;
      for (int i = 0; i < 256; ++i) ASSERT_NCCL(w.put(&byte, 1, 1, 0));
      EXPECT_EQ(w.put(&byte, 1, 1, 0), ncclRemoteError);
      EXPECT_NE(last().find("rank 1 has not fetched 256 puts within 2000 ms"), std::string::npos) << last();
      board->counters[0] = 1;
    }
    while (board->counters[0] == 0) usleep(1000);
    if (rank == 1) {
      EXPECT_NCCL(w.wait(0, 256));
      EXPECT_EQ(w.memory[0], 3);
      board->counters[1] = 1;
    }
    while (board->counters[1] == 0) usleep(1000);
  });
}

TEST(ShimRmaEnd, ASignalThatDoesNotComeIsAnErrorInTime) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    setenv("MOECCL_TIMEOUT_MS", "2000", 1);
    WithWindow w(*board, 2, rank, 16);
    if (rank == 1) {
      EXPECT_NCCL(ncclSignal(0, 0, 0, 0, w.comm, nullptr));
      while (board->counters[0] == 0) usleep(1000);
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    EXPECT_EQ(w.wait(1, 3), ncclRemoteError);
    EXPECT_GE(elapsed_ms(start), 1990);
    EXPECT_NE(last().find("rank 1 has sent 1 of 3 signals (index 0, context 0) within 2000 ms"), std::string::npos)
        << last();
    board->counters[0] = 1;
  });
}

// Rank 1 dies. Ranks that wait for it or put into it learn this long before the deadline.
TEST(ShimRmaEnd, ADeadPeerIsNamed) {
  Board* board = new_board();
  const auto work = [&](int rank) {
    ncclComm_t comm = nullptr;
    ncclWindow_t window = nullptr;
    unsigned char memory[64] = {};
    ASSERT_NCCL(ncclCommInitRank(&comm, 3, meet(*board, rank), rank));
    ASSERT_NCCL(ncclCommWindowRegister(comm, memory, sizeof memory, &window, 0));
    ASSERT_NCCL(ncclPutSignal(memory, 1, ncclUint8, (rank + 1) % 3, window, 0, 0, 0, 0, comm, nullptr));
    ncclWaitSignalDesc_t wanted = {1, (rank + 2) % 3, 0, 0};
    ASSERT_NCCL(ncclWaitSignal(1, &wanted, comm, nullptr));
    board->counters[0]++;
    while (board->counters[0] < 3) usleep(1000);
    if (rank == 1) kill(getpid(), SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    if (rank == 2) {
      wanted = {1, 1, 0, 0};
      EXPECT_EQ(ncclWaitSignal(1, &wanted, comm, nullptr), ncclRemoteError);
      EXPECT_NE(last().find("rank 1 has sent 0 of 1 signals"), std::string::npos) << last();
      EXPECT_NE(last().find("its process has ended"), std::string::npos) << last();
    } else {
      ncclResult_t result = ncclSuccess;
      while (result == ncclSuccess && elapsed_ms(start) < 10000)
        result = ncclPutSignal(memory, 64, ncclUint8, 1, window, 0, 0, 0, 0, comm, nullptr);
      EXPECT_EQ(result, ncclRemoteError);
      EXPECT_NE(last().find("rank 1 (process"), std::string::npos) << last();
    }
    EXPECT_LT(static_cast<double>(elapsed_ms(start)), patient(5000));
    (void)ncclCommAbort(comm);
  };
  in_processes(3, work, {1});
}

TEST(ShimRmaEnd, ASignalOutlivesItsSender) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    WithWindow w(*board, 2, rank, 16);
    const unsigned char byte = 7;
    if (rank == 1) {
      EXPECT_NCCL(w.put(&byte, 1, 0, 3));
      board->counters[0] = getpid();
      return;
    }
    while (board->counters[0] == 0) usleep(1000);
    while (access(("/proc/" + std::to_string(board->counters[0]) + "/fd/0").c_str(), F_OK) == 0) usleep(1000);
    EXPECT_NCCL(w.wait(1));
    EXPECT_EQ(w.memory[3], 7);
    EXPECT_EQ(w.wait(1), ncclRemoteError) << "and nothing more";
  });
}

TEST(ShimRmaEnd, AnAbortEndsAWait) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    const auto start = std::chrono::steady_clock::now();
    std::atomic<bool> waits{false};
    std::thread waiter([&] {
      ncclWaitSignalDesc_t wanted = {1, 1 - rank, 0, 0};
      waits = true;
      const ncclResult_t result = ncclWaitSignal(1, &wanted, comm, nullptr);
      // On a loaded machine the abort may come first, and then the communicator no longer exists. Rank 0's ends rank
      // 1's wait too.
      EXPECT_TRUE(result == ncclInvalidUsage || result == ncclInvalidArgument ||
                  (rank == 1 && result == ncclRemoteError))
          << result;
    });
    while (!waits) usleep(1000);
    usleep(100000);
    while (rank == 1 && board->counters[0] == 0) usleep(1000);
    EXPECT_NCCL(ncclCommAbort(comm));
    waiter.join();
    EXPECT_LT(static_cast<double>(elapsed_ms(start)), patient(5000));
    board->counters[0]++;  // a process that ends would end the other one's wait
    while (board->counters[0] < 2) usleep(1000);
  });
}

// Rank 1 does this to its communicator, in which rank 0 waits, and lives on.
struct End {
  const char* name;
  ncclResult_t (*call)(ncclComm_t);
  ncclResult_t wanted;  // on rank 0
};
const End kEnds[] = {
    {"revokes", [](ncclComm_t c) { return ncclCommRevoke(c, NCCL_REVOKE_DEFAULT); }, ncclInvalidUsage},
    {"destroys", ncclCommDestroy, ncclRemoteError},
    {"aborts", ncclCommAbort, ncclRemoteError},
};

// `wait` is what rank 0 calls, with a window of 16 bytes on each rank.
void expect_end(const std::function<ncclResult_t(ncclComm_t, ncclWindow_t)>& wait) {
  for (const End& end : kEnds) {
    SCOPED_TRACE(end.name);
    Board* board = new_board();
    in_processes(2, [&](int rank) {
      forbid_writing();
      ncclComm_t comm = nullptr;
      ncclWindow_t window = nullptr;
      unsigned char memory[16] = {};
      ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
      ASSERT_NCCL(ncclCommWindowRegister(comm, memory, sizeof memory, &window, 0));
      if (rank == 1) {
        while (board->counters[0] == 0) usleep(1000);
        usleep(200000);
        board->counters[1] = 1;
        EXPECT_NCCL(end.call(comm));
        while (board->counters[2] == 0) usleep(1000);
        return;
      }
      board->counters[0] = 1;
      const auto start = std::chrono::steady_clock::now();
      EXPECT_EQ(wait(comm, window), end.wanted) << last();
      EXPECT_EQ(board->counters[1], 1) << "it waited until then: " << last();
      EXPECT_LT(static_cast<double>(elapsed_ms(start)), patient(5000));
      board->counters[2] = 1;
      (void)ncclCommAbort(comm);
    });
  }
}

TEST(ShimRmaEnd, APeersEndEndsAWait) {
  expect_end([](ncclComm_t comm, ncclWindow_t) {
    ncclWaitSignalDesc_t wanted = {1, 1, 0, 0};
    return ncclWaitSignal(1, &wanted, comm, nullptr);
  });
}

TEST(ShimRmaEnd, APeersEndEndsAPutThatFindsNoRoom) {
  expect_end([](ncclComm_t comm, ncclWindow_t window) {
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < 257 && result == ncclSuccess; ++i)
      result = ncclPutSignal("x", 1, ncclUint8, 1, window, 0, 0, 0, 0, comm, nullptr);
    return result;
  });
}

TEST(ShimRmaEnd, ASignalOutlivesItsSendersCommunicator) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    ncclWaitSignalDesc_t wanted = {1, 1, 0, 0};
    if (rank == 1) {
      EXPECT_NCCL(ncclSignal(0, 0, 0, 0, comm, nullptr));
      EXPECT_NCCL(ncclCommDestroy(comm));
      board->counters[0] = 1;
      while (board->counters[1] == 0) usleep(1000);
      return;
    }
    while (board->counters[0] == 0) usleep(1000);
    EXPECT_NCCL(ncclWaitSignal(1, &wanted, comm, nullptr));
    EXPECT_EQ(ncclWaitSignal(1, &wanted, comm, nullptr), ncclRemoteError) << "and nothing more";
    board->counters[1] = 1;
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

// A child that ends what it has inherited, as some programs do at exit, says nothing for its parent. It does not wait
// for the parent's threads either, which it does not have.
TEST(ShimRmaEnd, AForkedChildEndsNothingOfItsParent) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    WithWindow w(*board, 2, rank, 16);
    if (rank == 1) {
      EXPECT_NCCL(w.wait(0)) << last();
      EXPECT_NCCL(ncclSignal(0, 0, 0, 0, w.comm, nullptr));
      while (board->counters[1] == 0) usleep(1000);
      return;
    }
    std::thread waits([&] { EXPECT_NCCL(w.wait(1)); });
    usleep(200'000);
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      _exit(ncclCommAbort(w.comm) == ncclSuccess ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    usleep(200'000);  // rank 1 would notice
    EXPECT_NCCL(ncclSignal(1, 0, 0, 0, w.comm, nullptr));
    waits.join();
    board->counters[1] = 1;
  });
}

}  // namespace
}  // namespace moeccl::testing
