// SPDX-License-Identifier: Apache-2.0
// When one rank reports an operation as done, no other rank reports it as failed because of a later event: a failure in
// the next operation, a rank that left after its part, an abort afterwards (scoreboard line 10).
#include <gtest/gtest.h>

#include <atomic>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4;

class Agreement : public ::testing::TestWithParam<RankMode> {};

// Rank 2 passes another count in the second operation, while slower ranks are still in the first.
TEST_P(Agreement, AFailureDoesNotReachBackIntoAnOperationThatIsDone) {
  for (int round = 0; round < scaled(30) && !HasFailure(); ++round) {
    run_ranks(kRanks,
              [round](int rank, moecclComm_t comm) {
                std::vector<float> in(4096, 1), out(4 * 4096);
                const size_t count = size_t{1} << (round % 12);
                for (int i = 0; i < 3; ++i) {
                  MOECCL_ASSERT_COMM_OK(moecclAllGather(in.data(), out.data(), count, moecclFloat32, comm, nullptr),
                                        comm);
                }
                const size_t other = rank == 2 ? count + 1 : count;
                EXPECT_EQ(moecclAllReduce(in.data(), out.data(), other, moecclFloat32, moecclSum, comm, nullptr),
                          moecclMismatch);
              },
              {.mode = GetParam()});
  }
}

TEST_P(Agreement, ARankThatLeavesAfterItsPartHurtsNobody) {
  for (int round = 0; round < scaled(30) && !HasFailure(); ++round) {
    run_ranks(
        kRanks,
        [round](int rank, moecclComm_t comm) {
          const size_t count = size_t{1} << (round % 18);
          std::vector<float> in(count, static_cast<float>(rank)), out(count * kRanks, -1);
          const int root = round % kRanks;
          switch (round % 5) {
            case 0:
              MOECCL_ASSERT_COMM_OK(moecclAllToAll(out.data(), out.data(), count, moecclFloat32, comm, nullptr), comm);
              break;
            case 1:
              MOECCL_ASSERT_COMM_OK(moecclBroadcast(in.data(), out.data(), count, moecclFloat32, root, comm, nullptr),
                                    comm);
              break;
            case 2:
              MOECCL_ASSERT_COMM_OK(moecclGather(in.data(), out.data(), count, moecclFloat32, root, comm, nullptr),
                                    comm);
              break;
            case 3:
              MOECCL_ASSERT_COMM_OK(moecclAllGather(in.data(), out.data(), count, moecclFloat32, comm, nullptr), comm);
              break;
            default:
              MOECCL_ASSERT_COMM_OK(
                  moecclAllReduce(in.data(), out.data(), count, moecclFloat32, moecclSum, comm, nullptr), comm);
          }
        },
        {.mode = GetParam()});
  }
}

// The receiver takes the data and then goes. The sender has nothing left to wait for.
TEST_P(Agreement, MessagesThatWereTakenWereSent) {
  for (int round = 0; round < scaled(30) && !HasFailure(); ++round) {
    run_ranks(kRanks,
              [round](int rank, moecclComm_t comm) {
                const size_t count = size_t{1} << (round % 20);
                std::vector<float> out(count, static_cast<float>(rank)), in(count, -1);
                const int next = (rank + 1) % kRanks, before = (rank + kRanks - 1) % kRanks;
                MOECCL_ASSERT_OK(moecclGroupStart());
                MOECCL_EXPECT_COMM_OK(moecclSend(out.data(), count, moecclFloat32, next, comm, nullptr), comm);
                MOECCL_EXPECT_COMM_OK(moecclRecv(in.data(), count, moecclFloat32, before, comm, nullptr), comm);
                MOECCL_ASSERT_COMM_OK(moecclGroupEnd(), comm);
                EXPECT_EQ(in.back(), static_cast<float>(before));
              },
              {.mode = GetParam()});
  }
}

TEST_P(Agreement, AnAbortAfterwardsHurtsNoOperationBefore) {
  for (int round = 0; round < scaled(30) && !HasFailure(); ++round) {
    run_ranks(kRanks,
              [round](int rank, moecclComm_t comm) {
                std::vector<float> data(size_t{1} << (round % 16), 1);
                MOECCL_ASSERT_COMM_OK(
                    moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, nullptr),
                    comm);
                if (rank == round % kRanks) {
                  EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
                }
              },
              {.mode = GetParam()});
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, Agreement, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

}  // namespace
}  // namespace moeccl::testing
