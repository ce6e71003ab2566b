// SPDX-License-Identifier: Apache-2.0
// Aborts of communicators that run operations which other ranks do not join.
#include <chrono>

#include "tests/shim/nccl_ranks.h"

namespace moeccl::testing {
namespace {

TEST(ShimAbort, EndsACallOfAnotherThread) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comm = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&comm, 2, meet(*board, rank), rank));
    if (rank == 1) {
      while (board->counters[0].load() == 0) usleep(1000);  // never answers
      ncclCommDestroy(comm);
      return;
    }
    std::thread caller([&] {
      float x = 1;
      EXPECT_NE(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, nullptr), ncclSuccess);
    });
    usleep(100'000);
    EXPECT_NCCL(ncclCommAbort(comm));
    caller.join();
    board->counters[0].store(1);
    float x = 1;
    EXPECT_EQ(ncclAllReduce(&x, &x, 1, ncclFloat32, ncclSum, comm, nullptr), ncclInvalidArgument) << "freed";
  });
}

// A stream holds an operation of the second communicator, which its peer never joins, and behind it one of the first.
TEST(ShimAbort, OfSeveralInAGroupDoesNotWaitForEach) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t first = nullptr, second = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&first, 2, meet(*board, rank), rank));
    ASSERT_NCCL(ncclCommSplit(first, 0, 0, &second, nullptr));
    int32_t one = 1, a = 0, b = 0;
    const HostStream stream;
    if (rank == 0) {
      ASSERT_NCCL(ncclAllReduce(&one, &b, 1, ncclInt32, ncclSum, second, stream.get()));
      ASSERT_NCCL(ncclAllReduce(&one, &a, 1, ncclInt32, ncclSum, first, stream.get()));
      usleep(50'000);
    }
    const auto begun = std::chrono::steady_clock::now();
    ASSERT_NCCL(ncclGroupStart());
    if (rank == 1) {
      while (board->counters[0].load() == 0) usleep(1000);
    }
    EXPECT_NCCL(ncclCommAbort(first));
    EXPECT_NCCL(ncclCommAbort(second));
    ASSERT_NCCL(ncclGroupEnd());
    if (rank == 0) {
      EXPECT_LT(seconds_since(begun), patient(15)) << "half of the operations' timeout";
      board->counters[0].store(1);
    }
  });
}

// One thread drives the operations of both communicators until the last one has ended. The program ends the first
// communicator in some way, and only then aborts the second.
enum class Ends { kAborts, kRevokes, kRevokesAndShrinks, kShrinks };
void end_one_after_another(Ends ends, bool on_stream) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t first = nullptr, second = nullptr;
    ASSERT_NCCL(ncclCommInitRank(&first, 2, meet(*board, rank), rank));
    ASSERT_NCCL(ncclCommSplit(first, 0, 0, &second, nullptr));
    if (rank == 1) {
      while (board->counters[0].load() == 0) usleep(1000);
      for (const ncclComm_t comm : {first, second}) EXPECT_NCCL(ncclCommAbort(comm));
      return;
    }
    int32_t one = 1, a = 0, b = 0;
    const HostStream stream;
    std::thread caller([&] {
      const cudaStream_t on = on_stream ? stream.get() : nullptr;
      ASSERT_NCCL(ncclGroupStart());
      ASSERT_NCCL(ncclAllReduce(&one, &a, 1, ncclInt32, ncclSum, first, on));
      ASSERT_NCCL(ncclAllReduce(&one, &b, 1, ncclInt32, ncclSum, second, on));
      EXPECT_EQ(ncclGroupEnd(), on_stream ? ncclSuccess : ncclInvalidUsage);
    });
    usleep(100'000);
    const auto begun = std::chrono::steady_clock::now();
    if (ends == Ends::kRevokes || ends == Ends::kRevokesAndShrinks) {
      EXPECT_NCCL(ncclCommRevoke(first, NCCL_REVOKE_DEFAULT));
    }
    if (ends == Ends::kShrinks || ends == Ends::kRevokesAndShrinks) {
      ncclComm_t rest = nullptr;
      int excluded = 1, count = 0;
      ASSERT_NCCL(ncclCommShrink(first, &excluded, 1, &rest, nullptr,
                                 ends == Ends::kShrinks ? NCCL_SHRINK_ABORT : NCCL_SHRINK_DEFAULT));
      EXPECT_NCCL(ncclCommCount(rest, &count));
      EXPECT_EQ(count, 1);
      EXPECT_NCCL(ncclCommDestroy(rest));
    }
    const ncclResult_t ended = ends == Ends::kAborts ? ncclCommAbort(first) : ncclCommDestroy(first);
    EXPECT_NCCL(ended);
    EXPECT_NCCL(ncclCommAbort(second));
    EXPECT_LT(seconds_since(begun), patient(15)) << "half of the operations' timeout";
    caller.join();
    board->counters[0].store(1);
  });
}

TEST(ShimAbort, OneAfterAnotherEndsAGroup) { end_one_after_another(Ends::kAborts, false); }
TEST(ShimAbort, OneAfterAnotherEndsAGroupOnAStream) { end_one_after_another(Ends::kAborts, true); }
TEST(ShimAbort, AfterARevocationEndsAGroup) { end_one_after_another(Ends::kRevokes, false); }
TEST(ShimAbort, AfterARevocationAndAShrinkEndsAGroup) { end_one_after_another(Ends::kRevokesAndShrinks, false); }
TEST(ShimAbort, AfterAShrinkEndsAGroup) { end_one_after_another(Ends::kShrinks, false); }

// Until the last of the three is aborted, the group uses them all.
void abort_three(bool on_stream) {
  Board* board = new_board();
  in_processes(2, [&](int rank) {
    ncclComm_t comms[3] = {};
    ASSERT_NCCL(ncclCommInitRank(&comms[0], 2, meet(*board, rank), rank));
    for (int i = 1; i < 3; ++i) ASSERT_NCCL(ncclCommSplit(comms[0], 0, 0, &comms[i], nullptr));
    if (rank == 1) {
      while (board->counters[0].load() == 0) usleep(1000);
      for (const ncclComm_t comm : comms) EXPECT_NCCL(ncclCommAbort(comm));
      return;
    }
    int32_t one = 1, sums[3] = {};
    const HostStream stream;
    std::thread caller([&] {
      ASSERT_NCCL(ncclGroupStart());
      for (int i = 0; i < 3; ++i)
        ASSERT_NCCL(ncclAllReduce(&one, &sums[i], 1, ncclInt32, ncclSum, comms[i], on_stream ? stream.get() : nullptr));
      EXPECT_EQ(ncclGroupEnd(), on_stream ? ncclSuccess : ncclInvalidUsage);
    });
    usleep(100'000);
    const auto begun = std::chrono::steady_clock::now();
    for (const ncclComm_t comm : comms) EXPECT_NCCL(ncclCommAbort(comm));
    EXPECT_LT(seconds_since(begun), patient(1.5));
    caller.join();
    board->counters[0].store(1);
  });
}

TEST(ShimAbort, OneAfterAnotherDoesNotWaitForTheGroupEachTime) { abort_three(false); }
TEST(ShimAbort, OneAfterAnotherDoesNotWaitForTheGroupOnAStreamEachTime) { abort_three(true); }

}  // namespace
}  // namespace moeccl::testing
