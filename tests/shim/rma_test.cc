// SPDX-License-Identifier: Apache-2.0
// One-sided puts and signals through the shim: ncclPutSignal, ncclSignal, ncclWaitSignal between ranks of a host.
#include <signal.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "tests/shim/rma_ranks.h"

namespace moeccl::testing {
namespace {

unsigned char pattern(int rank, int round, size_t i) {
  return static_cast<unsigned char>(static_cast<size_t>(rank) * 77 + static_cast<size_t>(round) * 13 + i * 7);
}

// Each rank puts into its neighbour and waits for the other one. When the signal has arrived, all bytes have.
void go_round(Board& board, int n, int rank, size_t bytes, int rounds) {
  WithWindow w(board, n, rank, 2 * bytes + 3);
  const int to = (rank + 1) % n, from = (rank + n - 1) % n;
  std::vector<unsigned char> mine(bytes);
  for (int round = 0; round < rounds; ++round) {
    const size_t offset = round % 2 == 0 ? 3 : bytes + 3;
    for (size_t i = 0; i < bytes; ++i) mine[i] = pattern(rank, round, i);
    ASSERT_NCCL(w.put(mine.data(), bytes, to, offset));
    ASSERT_NCCL(w.wait(from));
    for (size_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(w.memory[offset + i], pattern(from, round, i)) << "round " << round << ", byte " << i;
    }
    // A half of the window is written again two rounds later, which must not happen before it was read.
    ASSERT_NCCL(ncclSignal(from, 1, 0, 0, w.comm, nullptr));
    ASSERT_NCCL(w.wait(to, 1, 1));
  }
}

TEST(ShimRma, BytesAreThereWhenTheSignalIs) {
  for (const size_t bytes : {size_t{1}, size_t{8}, size_t{4099}, size_t{3} << 20}) {
    Board* board = new_board();
    in_processes(3, [&](int rank) { go_round(*board, 3, rank, bytes, bytes < 4096 ? 2000 : bytes < 65536 ? 500 : 5); });
  }
}

TEST(ShimRma, BytesAreFetchedWhereProcessesAreClosed) {
  for (const size_t bytes : {size_t{1}, size_t{4099}, size_t{3} << 20}) {
    Board* board = new_board();
    in_processes(3, [&](int rank) {
      forbid_writing();
      go_round(*board, 3, rank, bytes, bytes < 65536 ? 500 : 5);
    });
  }
}

// There is room for 256 puts.
TEST(ShimRma, ARankThatWaitsFetchesMorePutsThanThereIsRoomFor) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    forbid_writing();
    WithWindow w(*board, 2, rank, 300);
    const auto put_all = [&] {
      for (int i = 0; i < 300; ++i) {
        const unsigned char byte = pattern(rank, i, 0);
        ASSERT_NCCL(w.put(&byte, 1, 1 - rank, static_cast<size_t>(i)));
      }
    };
    const auto wait_for_all = [&] {
      ASSERT_NCCL(w.wait(1 - rank, 300));
      for (int i = 0; i < 300; ++i) ASSERT_EQ(w.memory[static_cast<size_t>(i)], pattern(1 - rank, i, 0)) << i;
    };
    if (rank == 0) {
      put_all();
      ASSERT_NCCL(w.wait(1, 1, 1));
    } else {
      wait_for_all();
      ASSERT_NCCL(ncclSignal(0, 1, 0, 0, w.comm, nullptr));
    }
    // Both put first, and wait for room.
    put_all();
    wait_for_all();
    ASSERT_NCCL(ncclSignal(1 - rank, 2, 0, 0, w.comm, nullptr));  // fetched, so both may end
    ASSERT_NCCL(w.wait(1 - rank, 1, 2));
  });
}

// Rank 0 waits for rank 1, which waits for rank 2, which waits for room on rank 0.
TEST(ShimRma, ARankThatWaitsFetchesFromAll) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    forbid_writing();
    WithWindow w(*board, 3, rank, 16);
    const unsigned char byte = 5;
    if (rank == 2) {
      for (int i = 0; i < 300; ++i) ASSERT_NCCL(w.put(&byte, 1, 0, 3));
      ASSERT_NCCL(ncclSignal(1, 0, 0, 0, w.comm, nullptr));
      ASSERT_NCCL(w.wait(0));
    } else if (rank == 1) {
      ASSERT_NCCL(w.wait(2));
      ASSERT_NCCL(ncclSignal(0, 0, 0, 0, w.comm, nullptr));
    } else {
      ASSERT_NCCL(w.wait(1));
      ASSERT_NCCL(w.wait(2, 300));
      EXPECT_EQ(w.memory[3], 5);
      ASSERT_NCCL(ncclSignal(2, 0, 0, 0, w.comm, nullptr));
    }
  });
}

// Each process has one thread for two ranks, which puts for one of them while the other is being put to.
TEST(ShimRma, AThreadThatWaitsFetchesForAllOfItsRanks) {
  Board* board = new_board();
  in_processes(2, [&](int process) {
    forbid_writing();
    constexpr int kPuts = 300;
    const ncclUniqueId id = meet(*board, process);
    ncclComm_t comms[2];
    ncclWindow_t windows[2];
    unsigned char memory[2][kPuts] = {}, values[kPuts];
    for (int i = 0; i < kPuts; ++i) values[i] = pattern(process, i, 0);
    ASSERT_NCCL(ncclGroupStart());
    for (int i = 0; i < 2; ++i) ASSERT_NCCL(ncclCommInitRank(&comms[i], 4, id, 2 * process + i));
    ASSERT_NCCL(ncclGroupEnd());
    for (int i = 0; i < 2; ++i)
      ASSERT_NCCL(ncclCommWindowRegister(comms[i], memory[i], kPuts, &windows[i], NCCL_WIN_COLL_SYMMETRIC));
    // Rank 0 puts to rank 2, and rank 3 to rank 1.
    const int puts = process, waits = 1 - process, to = process == 0 ? 2 : 1, from = process == 0 ? 3 : 0;
    ASSERT_NCCL(ncclGroupStart());
    for (size_t i = 0; i < kPuts; ++i)
      EXPECT_NCCL(ncclPutSignal(&values[i], 1, ncclUint8, to, windows[puts], i, 0, 0, 0, comms[puts], nullptr));
    ncclWaitSignalDesc_t wanted = {kPuts, from, 0, 0};
    EXPECT_NCCL(ncclWaitSignal(1, &wanted, comms[waits], nullptr));
    ASSERT_NCCL(ncclGroupEnd());
    for (int i = 0; i < kPuts; ++i) ASSERT_EQ(memory[waits][i], pattern(1 - process, i, 0)) << i;
    // What was put has been fetched when its sender hears so.
    ASSERT_NCCL(ncclSignal(from, 1, 0, 0, comms[waits], nullptr));
    wanted = {1, to, 1, 0};
    ASSERT_NCCL(ncclWaitSignal(1, &wanted, comms[puts], nullptr));
    for (int i = 0; i < 2; ++i) {
      EXPECT_NCCL(ncclCommWindowDeregister(comms[i], windows[i]));
      EXPECT_NCCL(ncclCommDestroy(comms[i]));
    }
  });
}

// What rank 2 has left went with it. Only a wait for rank 2 fails.
TEST(ShimRma, BytesThatAreLostFailTheWaitForThem) {
  Board* board = new_board();
  const auto work = [&](int rank) {
    forbid_writing();
    WithWindow w(*board, 3, rank, 16);
    const unsigned char byte = 5;
    if (rank == 2) {
      ASSERT_NCCL(w.put(&byte, 1, 0, 3));
      board->counters[0] = getpid();
      _exit(0);
    }
    while (board->counters[0] == 0) usleep(1000);
    while (access(("/proc/" + std::to_string(board->counters[0]) + "/fd/0").c_str(), F_OK) == 0) usleep(1000);
    if (rank == 1) {
      usleep(200000);
      ASSERT_NCCL(ncclSignal(0, 0, 0, 0, w.comm, nullptr));
      ASSERT_NCCL(w.wait(0));
    } else {
      ASSERT_NCCL(w.wait(1));
      EXPECT_EQ(w.wait(2), ncclRemoteError);
      EXPECT_NE(last().find("1 bytes of rank 2 cannot be fetched"), std::string::npos) << last();
      ASSERT_NCCL(ncclSignal(1, 0, 0, 0, w.comm, nullptr));
    }
  };
  in_processes(3, work);
}

TEST(ShimRma, RanksMayBeThreads) {
  Board* board = new_board();
  in_threads(3, [&](int rank) { go_round(*board, 3, rank, 1000, 300); });
}

TEST(ShimRma, SignalsAreCountedByRankIndexAndContext) {
  Board* board = new_board();
  in_processes(3, [&](int rank) {
    WithWindow w(*board, 3, rank, 64);
    if (rank != 0) {
      for (int i = 0; i < 5; ++i) EXPECT_NCCL(ncclSignal(0, rank, 2, 0, w.comm, nullptr));
      const unsigned char byte = static_cast<unsigned char>(40 + rank);
      EXPECT_NCCL(w.put(&byte, 1, 0, static_cast<size_t>(rank), 63, 15));
      return;
    }
    EXPECT_NCCL(w.wait(2, 5, 2, 2));
    EXPECT_NCCL(w.wait(1, 3, 1, 2));
    EXPECT_NCCL(w.wait(1, 2, 1, 2)) << "the rest of them";
    ncclWaitSignalDesc_t both[] = {{1, 1, 63, 15}, {1, 2, 63, 15}};
    EXPECT_NCCL(ncclWaitSignal(2, both, w.comm, nullptr));
    EXPECT_EQ(w.memory[1], 41);
    EXPECT_EQ(w.memory[2], 42);
    EXPECT_NCCL(ncclWaitSignal(0, nullptr, w.comm, nullptr));
    EXPECT_NCCL(w.wait(1, 0));
    const unsigned char own = 9;
    EXPECT_NCCL(w.put(&own, 1, 0, 5)) << "into one's own window";
    EXPECT_NCCL(w.wait(0));
    EXPECT_EQ(w.memory[5], 9);
  });
}

// Tests memory of ncclMemAlloc, a second window, and typed counts.
TEST(ShimRma, WindowsAreNumberedByTheirOrder) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    WithWindow w(*board, 2, rank, 8);
    void* heap = nullptr;
    ncclWindow_t second = nullptr;
    ASSERT_NCCL(ncclMemAlloc(&heap, 1 << 16));
    std::memset(heap, 0, 1 << 16);
    ASSERT_NCCL(ncclCommWindowRegister(w.comm, heap, 1 << 16, &second, NCCL_WIN_COLL_SYMMETRIC));
    const double values[3] = {1.5, 2.5, 100.0 + rank};
    EXPECT_NCCL(ncclPutSignal(values, 3, ncclFloat64, 1 - rank, second, 80, 0, 0, 0, w.comm, nullptr));
    EXPECT_NCCL(w.wait(1 - rank));
    EXPECT_EQ(static_cast<double*>(heap)[12], 101.0 - rank);
    EXPECT_EQ(w.memory, std::vector<unsigned char>(8));
    ncclCommProperties_t properties{};
    properties.size = sizeof properties;
    properties.magic = NCCL_CONFIG_MAGIC;
    EXPECT_NCCL(ncclCommQueryProperties(w.comm, &properties));
    EXPECT_TRUE(properties.hostRmaSupport);
    EXPECT_NE(properties.commHash, 0u);
    // A window that no longer exists on the other rank is an error here, and not a write to whatever is there now.
    EXPECT_NCCL(ncclCommWindowDeregister(w.comm, second));
    EXPECT_NCCL(ncclSignal(1 - rank, 7, 0, 0, w.comm, nullptr));
    EXPECT_NCCL(w.wait(1 - rank, 1, 7));
    EXPECT_EQ(ncclPutSignal(values, 1, ncclFloat64, 1 - rank, second, 0, 0, 0, 0, w.comm, nullptr),
              ncclInvalidArgument);
    EXPECT_NCCL(ncclMemFree(heap));
  });
}

// Rank 1 gives its windows back in another order than rank 0, and some windows stay.
TEST(ShimRma, WindowsThatAreGoneMakeRoom) {
  constexpr int kMost = 1024;  // windows at a time
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    WithWindow stays(*board, 2, rank, 8);
    std::vector<unsigned char> memory(2 * kMost);
    const auto add = [&](size_t at) {
      ncclWindow_t window = nullptr;
      EXPECT_NCCL(ncclCommWindowRegister(stays.comm, &memory[at], 1, &window, NCCL_WIN_COLL_SYMMETRIC));
      return window;
    };
    const auto put = [&](ncclWindow_t window, unsigned char value) {
      return ncclPutSignal(&value, 1, ncclUint8, 1 - rank, window, 0, 0, 0, 0, stays.comm, nullptr);
    };
    for (size_t round = 0; round < kMost; ++round) {
      ncclWindow_t pair[] = {add(2 * round), add(2 * round + 1)};
      const auto value = static_cast<unsigned char>(1 + round % 200);
      ASSERT_NCCL(put(pair[0], value)) << last();
      ASSERT_NCCL(put(pair[1], value)) << last();
      ASSERT_NCCL(stays.wait(1 - rank, 2));
      ASSERT_EQ(memory[2 * round], value);
      ASSERT_EQ(memory[2 * round + 1], value);
      for (const int i : {rank, 1 - rank}) ASSERT_NCCL(ncclCommWindowDeregister(stays.comm, pair[i]));
    }
    ASSERT_NCCL(stays.put("x", 1, 1 - rank, 0));
    ASSERT_NCCL(stays.wait(1 - rank));
    EXPECT_EQ(stays.memory[0], 'x');

    std::vector<ncclWindow_t> all;
    for (size_t i = 0; i < kMost; ++i) all.push_back(add(i));  // one more than there is room for
    ASSERT_NCCL(put(all[kMost - 2], 7));
    ASSERT_NCCL(stays.wait(1 - rank));
    EXPECT_EQ(memory[kMost - 2], 7);
    EXPECT_EQ(put(all.back(), 7), ncclInvalidUsage);
    EXPECT_NE(last().find("deregister windows"), std::string::npos) << last();
    for (ncclWindow_t window : all) ASSERT_NCCL(ncclCommWindowDeregister(stays.comm, window));
    ncclWindow_t again = add(0);
    ASSERT_NCCL(put(again, 8)) << last();
    ASSERT_NCCL(stays.wait(1 - rank));
    EXPECT_EQ(memory[0], 8);
    ASSERT_NCCL(ncclSignal(1 - rank, 1, 0, 0, stays.comm, nullptr));
    ASSERT_NCCL(stays.wait(1 - rank, 1, 1));
    ASSERT_NCCL(ncclCommWindowDeregister(stays.comm, again));
  });
}

// One thread drives all ranks. In a group, puts go before waits, whatever their order.
TEST(ShimRma, AGroupPutsBeforeItWaits) {
  in_processes(1, [](int) {
    constexpr int kRanks = 3;
    ncclComm_t comms[kRanks];
    ncclWindow_t windows[kRanks];
    int32_t memory[kRanks] = {}, sums[kRanks] = {};
    ASSERT_NCCL(ncclCommInitAll(comms, kRanks, nullptr));
    for (int r = 0; r < kRanks; ++r)
      ASSERT_NCCL(ncclCommWindowRegister(comms[r], &memory[r], 4, &windows[r], NCCL_WIN_COLL_SYMMETRIC));
    const int32_t values[kRanks] = {10, 20, 30};
    ASSERT_NCCL(ncclGroupStart());
    for (int r = 0; r < kRanks; ++r) {
      ncclWaitSignalDesc_t wanted = {1, (r + 1) % kRanks, 0, 0};
      EXPECT_NCCL(ncclWaitSignal(1, &wanted, comms[r], nullptr));
      EXPECT_NCCL(ncclPutSignal(&values[r], 1, ncclInt32, (r + 2) % kRanks, windows[r], 0, 0, 0, 0, comms[r], nullptr));
      EXPECT_NCCL(ncclAllReduce(&values[r], &sums[r], 1, ncclInt32, ncclSum, comms[r], nullptr));
    }
    EXPECT_EQ(memory[0], 0);
    ASSERT_NCCL(ncclGroupEnd());
    EXPECT_EQ(memory[0], 20);
    EXPECT_EQ(memory[1], 30);
    EXPECT_EQ(memory[2], 10);
    EXPECT_EQ(sums[1], 60);
    // A call that fails its checks makes the group fail, and no part of the group runs.
    ASSERT_NCCL(ncclGroupStart());
    EXPECT_NCCL(ncclPutSignal(&values[0], 1, ncclInt32, 1, windows[0], 0, 0, 0, 0, comms[0], nullptr));
    EXPECT_EQ(ncclSignal(9, 0, 0, 0, comms[0], nullptr), ncclInvalidArgument);
    EXPECT_EQ(ncclGroupEnd(), ncclInvalidArgument);
    EXPECT_EQ(memory[1], 30);
    // A thread that waits for itself outside a group would wait for ever, but this one has put before.
    for (int r = 0; r < kRanks; ++r) {
      EXPECT_NCCL(ncclCommWindowDeregister(comms[r], windows[r]));
      EXPECT_NCCL(ncclCommDestroy(comms[r]));
    }
  });
}

TEST(ShimRma, MistakesAreNamed) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    WithWindow w(*board, 2, rank, 16);
    const unsigned char byte = 1;
    const auto refused = [&](ncclResult_t result, const char* word) {
      EXPECT_EQ(result, ncclInvalidArgument) << word;
      EXPECT_NE(last().find(word), std::string::npos) << last();
    };
    refused(w.put(&byte, 1, 2, 0), "peer is 2: give 0 to 1");
    refused(w.put(&byte, 1, 1 - rank, 0, 64), "sigIdx is 64");
    refused(w.put(&byte, 1, 1 - rank, 0, 0, 16), "ctx is 16");
    refused(w.put(&byte, 1, 1 - rank, 16), "offset 16 and 1 bytes lie beyond it");
    refused(w.put(&byte, ~size_t{0}, 1 - rank, 8), "lie beyond it");
    refused(w.put(nullptr, 1, 1 - rank, 0), "localbuff is NULL");
    refused(ncclPutSignal(&byte, 1, ncclNumTypes, 0, w.window, 0, 0, 0, 0, w.comm, nullptr), "datatype is 12");
    refused(ncclPutSignal(&byte, 1, ncclUint8, 0, nullptr, 0, 0, 0, 0, w.comm, nullptr), "peerWin is no window");
    refused(ncclPutSignal(&byte, 1, ncclUint8, 0, w.window, 0, 0, 0, 1, w.comm, nullptr), "flags is 1");
    refused(ncclSignal(-1, 0, 0, 0, w.comm, nullptr), "peer is -1");
    refused(ncclWaitSignal(1, nullptr, w.comm, nullptr), "signalDescs is NULL");
    refused(ncclWaitSignal(-1, nullptr, w.comm, nullptr), "nDesc is -1");
    refused(w.wait(1 - rank, -2), "opCnt is -2");
    EXPECT_NCCL(w.put(nullptr, 0, 1 - rank, 16)) << "nothing, at the end";
    EXPECT_NCCL(w.wait(1 - rank));
  });
}

// Rank 0 registers late, and a put waits for it.
TEST(ShimRma, APutWaitsForThePeersWindow) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ncclWindow_t window = nullptr;
    int32_t memory = 0;
    const int32_t value = 5;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    if (rank == 0) usleep(200000);
    ASSERT_NCCL(ncclCommWindowRegister(comm, &memory, 4, &window, 0));
    if (rank == 1) {
      EXPECT_NCCL(ncclPutSignal(&value, 1, ncclInt32, 0, window, 0, 0, 0, 0, comm, nullptr));
    } else {
      ncclWaitSignalDesc_t wanted = {1, 1, 0, 0};
      EXPECT_NCCL(ncclWaitSignal(1, &wanted, comm, nullptr));
      EXPECT_EQ(memory, 5);
    }
    EXPECT_NCCL(ncclCommDestroy(comm));
  });
}

}  // namespace
}  // namespace moeccl::testing
