// SPDX-License-Identifier: Apache-2.0
// Send and Recv, groups and streams.
#include <gtest/gtest.h>

#include <thread>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

class ApiMessages : public ::testing::TestWithParam<RankMode> {};

TEST_P(ApiMessages, ArriveInCallOrderPerPair) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              for (int32_t i = 0; i < 200; ++i) {
                int32_t value = i;
                if (rank == 0) {
                  MOECCL_ASSERT_COMM_OK(moecclSend(&value, 1, moecclInt32, 1, comm, nullptr), comm);
                } else {
                  value = -1;
                  MOECCL_ASSERT_COMM_OK(moecclRecv(&value, 1, moecclInt32, 0, comm, nullptr), comm);
                  EXPECT_EQ(value, i);
                }
              }
            },
            {.mode = GetParam()});
}

TEST_P(ApiMessages, OfEverySizeArriveWhole) {
  run_ranks(3,
            [](int rank, moecclComm_t comm) {
              for (size_t count : {size_t{0}, size_t{1}, size_t{1023}, size_t{65536}, size_t{3'000'001}}) {
                std::vector<uint8_t> data(count + 1, 0);
                if (rank == 2) {
                  for (size_t i = 0; i < count; ++i) data[i] = static_cast<uint8_t>(i * 31 + count);
                  MOECCL_ASSERT_COMM_OK(moecclSend(data.data(), count, moecclUint8, 0, comm, nullptr), comm);
                } else if (rank == 0) {
                  MOECCL_ASSERT_COMM_OK(moecclRecv(data.data(), count, moecclUint8, 2, comm, nullptr), comm);
                  size_t wrong = 0;
                  for (size_t i = 0; i < count; ++i) wrong += data[i] != static_cast<uint8_t>(i * 31 + count);
                  EXPECT_EQ(wrong, 0u) << count << " bytes";
                  EXPECT_EQ(data[count], 0);
                }
              }
            },
            {.mode = GetParam()});
}

// A paced link holds a message back for as long as it would cross the link; the sender need not stay.
TEST_P(ApiMessages, ArriveFromARankThatHasLeft) {
  RankOptions options{.mode = GetParam(), .destroy = false};
  options.config.topology = "node:2(bw=0.001GB/s,lat=10us) rank:1";
  options.config.pace = 1;
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        std::vector<uint8_t> data(100'000, rank == 0 ? 7 : 0);
        if (rank == 0) {
          MOECCL_ASSERT_COMM_OK(moecclSend(data.data(), data.size(), moecclUint8, 1, comm, nullptr), comm);
        } else {
          MOECCL_ASSERT_COMM_OK(moecclRecv(data.data(), data.size(), moecclUint8, 0, comm, nullptr), comm);
          EXPECT_EQ(data, std::vector<uint8_t>(data.size(), 7));
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

// A ring of blocking calls in the wrong order would wait for ever. In a group the order does not matter.
TEST_P(ApiMessages, InAGroupCannotDeadlockOnTheirOrder) {
  run_ranks(5,
            [](int rank, moecclComm_t comm) {
              constexpr size_t kCount = 300'000;
              std::vector<int32_t> out(kCount, rank), in(kCount, -1);
              MOECCL_ASSERT_OK(moecclGroupStart());
              MOECCL_EXPECT_COMM_OK(moecclSend(out.data(), kCount, moecclInt32, (rank + 1) % 5, comm, nullptr), comm);
              MOECCL_EXPECT_COMM_OK(moecclRecv(in.data(), kCount, moecclInt32, (rank + 4) % 5, comm, nullptr), comm);
              MOECCL_ASSERT_OK(moecclGroupEnd());
              EXPECT_EQ(in.front(), (rank + 4) % 5);
              EXPECT_EQ(in.back(), (rank + 4) % 5);
            },
            {.mode = GetParam()});
}

TEST_P(ApiMessages, SeveralPerPairInOneGroupKeepTheirOrder) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              int32_t out[8], in[8] = {};
              MOECCL_ASSERT_OK(moecclGroupStart());
              for (int i = 0; i < 8; ++i) {
                out[i] = rank * 100 + i;
                MOECCL_EXPECT_COMM_OK(moecclSend(&out[i], 1, moecclInt32, 1 - rank, comm, nullptr), comm);
              }
              for (int i = 0; i < 8; ++i)
                MOECCL_EXPECT_COMM_OK(moecclRecv(&in[i], 1, moecclInt32, 1 - rank, comm, nullptr), comm);
              MOECCL_ASSERT_OK(moecclGroupEnd());
              for (int i = 0; i < 8; ++i) EXPECT_EQ(in[i], (1 - rank) * 100 + i);
            },
            {.mode = GetParam()});
}

// One thread drives both ranks of two communicators.
TEST(ApiMessagesOfOneThread, ThousandsInOneGroup) {
  RankOptions options;
  options.init = options.destroy = false;
  run_ranks(
      1,
      [](int, moecclComm_t) {
        constexpr int kRanks = 2, kMessages = 1000;
        constexpr size_t kSizes[] = {1, 3000, 20'000};  // in a slot; in several; read from the sender
        moecclComm_t comms[2][kRanks];
        for (auto& c : comms) MOECCL_ASSERT_OK(moecclCommInitAll(c, kRanks, nullptr));
        for (const size_t count : kSizes) {
          const int n = count > 3000 ? 300 : kMessages;
          std::vector<int32_t> out(count);
          std::vector<std::vector<int32_t>> in(static_cast<size_t>(4 * n), std::vector<int32_t>(count, -1));
          for (size_t i = 0; i < count; ++i) out[i] = static_cast<int32_t>(i + count);
          MOECCL_ASSERT_OK(moecclGroupStart());
          for (int i = 0; i < n; ++i)
            for (int c = 0; c < 2; ++c)
              for (int r = 0; r < kRanks; ++r)
                MOECCL_EXPECT_OK(moecclSend(out.data(), count, moecclInt32, 1 - r, comms[c][r], nullptr));
          for (int i = 0; i < n; ++i)
            for (int c = 0; c < 2; ++c)
              for (int r = 0; r < kRanks; ++r)
                MOECCL_EXPECT_OK(moecclRecv(in[static_cast<size_t>((2 * c + r) * n + i)].data(), count, moecclInt32,
                                            1 - r, comms[c][r], nullptr));
          MOECCL_ASSERT_OK(moecclGroupEnd());
          for (const auto& got : in) ASSERT_EQ(got, out);
        }
        for (auto& c : comms)
          for (moecclComm_t comm : c) MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

TEST_P(ApiMessages, ToOneselfNeedAGroup) {
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        int32_t out = 7 + rank, in = 0;
        EXPECT_EQ(moecclSend(&out, 1, moecclInt32, rank, comm, nullptr), moecclInvalidUsage)
            << moecclGetLastError(comm);
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_EXPECT_COMM_OK(moecclSend(&out, 1, moecclInt32, rank, comm, nullptr), comm);
        MOECCL_EXPECT_COMM_OK(moecclRecv(&in, 1, moecclInt32, rank, comm, nullptr), comm);
        MOECCL_ASSERT_OK(moecclGroupEnd());
        EXPECT_EQ(in, 7 + rank);
        // They may be on different streams.
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        for (const bool stream_sends : {true, false}) {
          in = 0;
          MOECCL_ASSERT_OK(moecclGroupStart());
          MOECCL_EXPECT_COMM_OK(moecclSend(&out, 1, moecclInt32, rank, comm, stream_sends ? stream : nullptr), comm);
          MOECCL_EXPECT_COMM_OK(moecclRecv(&in, 1, moecclInt32, rank, comm, stream_sends ? nullptr : stream), comm);
          MOECCL_EXPECT_OK(moecclGroupEnd());
          MOECCL_EXPECT_OK(moecclStreamSynchronize(stream));
          EXPECT_EQ(in, 7 + rank);
        }
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
      },
      {.mode = GetParam()});
}

TEST_P(ApiMessages, OfAnotherSizeAreAMismatchAtTheReceiver) {
  Meeting received;
  run_ranks(2,
            [&](int rank, moecclComm_t comm) {
              std::vector<float> data(100);
              if (rank == 0) {
                // The sender may have gone on, or may learn of the receiver's failure.
                (void)moecclSend(data.data(), 64, moecclFloat32, 1, comm, nullptr);
                EXPECT_TRUE(received.wait_for(1));
                return;
              }
              EXPECT_EQ(moecclRecv(data.data(), 65, moecclFloat32, 0, comm, nullptr), moecclMismatch)
                  << moecclGetLastError(comm);
              received.arrive();
              const std::string text = moecclGetLastError(comm);
              EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
              EXPECT_NE(text.find("rank 1"), std::string::npos) << text;
            },
            {.mode = GetParam()});
}

TEST_P(ApiMessages, BetweenCollectivesDoNotDisturbThem) {
  run_ranks(3,
            [](int rank, moecclComm_t comm) {
              for (int i = 0; i < 50; ++i) {
                int32_t sum = 1, passed = i;
                MOECCL_ASSERT_COMM_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, nullptr), comm);
                EXPECT_EQ(sum, 3);
                if (rank == i % 3) {
                  MOECCL_ASSERT_COMM_OK(moecclSend(&passed, 1, moecclInt32, (i + 1) % 3, comm, nullptr), comm);
                }
                if (rank == (i + 1) % 3) {
                  passed = -1;
                  MOECCL_ASSERT_COMM_OK(moecclRecv(&passed, 1, moecclInt32, i % 3, comm, nullptr), comm);
                  EXPECT_EQ(passed, i);
                }
              }
            },
            {.mode = GetParam()});
}

TEST_P(ApiMessages, StreamsRunInOrderAndReturnAtOnce) {
  Meeting called;
  run_ranks(2,
            [&](int rank, moecclComm_t comm) {
              moecclStream_t stream = nullptr;
              MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
              // The peer comes after this rank's calls have returned, so a call that blocked would never end.
              if (rank == 1) {
                ASSERT_TRUE(called.wait_for(1));
              }
              std::vector<double> data(1000, 1);
              for (int i = 0; i < 10; ++i) {
                MOECCL_ASSERT_COMM_OK(
                    moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat64, moecclSum, comm, stream),
                    comm);
              }
              if (rank == 0) {
                moecclResult_t state = moecclSuccess;
                MOECCL_EXPECT_COMM_OK(moecclCommGetAsyncError(comm, &state), comm);
                EXPECT_EQ(state, moecclInProgress);
                called.arrive();
              }
              MOECCL_ASSERT_COMM_OK(moecclStreamSynchronize(stream), comm);
              for (double d : data) ASSERT_EQ(d, 1024.0) << "ten doublings, one after the other";
              moecclResult_t state = moecclInternalError;
              MOECCL_EXPECT_COMM_OK(moecclCommGetAsyncError(comm, &state), comm);
              EXPECT_EQ(state, moecclSuccess);
              EXPECT_EQ(moecclStreamDestroy(stream), moecclSuccess);
            },
            {.mode = GetParam()});
}

// A ring in which each rank sends on one stream and receives on another. The messages do not fit into staging, so a
// Send ends only when its Recv runs.
TEST_P(ApiMessages, InAGroupOnSeveralStreamsRunTogether) {
  run_ranks(3,
            [](int rank, moecclComm_t comm) {
              constexpr size_t kCount = 2'000'000;
              moecclStream_t streams[3] = {};  // the last one stays null: the call blocks
              for (int i = 0; i < 2; ++i) MOECCL_ASSERT_OK(moecclStreamCreate(&streams[i]));
              for (int i = 0; i < 12; ++i) {
                moecclStream_t sends = streams[(rank + i) % 3], receives = streams[(rank + i / 3) % 3];
                std::vector<int32_t> out(kCount, rank + i), in(kCount, -1);
                int32_t sum = 1;
                // The sum before the group ends when the group's streams come to it.
                MOECCL_EXPECT_COMM_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, streams[0]), comm);
                MOECCL_ASSERT_OK(moecclGroupStart());
                MOECCL_EXPECT_COMM_OK(moecclSend(out.data(), kCount, moecclInt32, (rank + 1) % 3, comm, sends), comm);
                MOECCL_EXPECT_COMM_OK(moecclRecv(in.data(), kCount, moecclInt32, (rank + 2) % 3, comm, receives), comm);
                MOECCL_ASSERT_OK(moecclGroupEnd());
                for (moecclStream_t s : {streams[0], streams[1]})
                  MOECCL_EXPECT_COMM_OK(moecclStreamSynchronize(s), comm);
                EXPECT_EQ(sum, 3);
                EXPECT_EQ(in.front(), (rank + 2) % 3 + i);
                EXPECT_EQ(in.back(), (rank + 2) % 3 + i);
              }
              for (int i = 0; i < 2; ++i) MOECCL_EXPECT_OK(moecclStreamDestroy(streams[i]));
            },
            {.mode = GetParam()});
}

// Collectives keep the order of their calls, although the ranks put them on different streams. What is put on any of
// the streams later runs after all of them.
TEST_P(ApiMessages, CollectivesOfAGroupKeepTheirOrderOnWhateverStreams) {
  run_ranks(
      2,
      [](int rank, moecclComm_t comm) {
        moecclStream_t streams[2] = {};
        for (moecclStream_t& s : streams) MOECCL_ASSERT_OK(moecclStreamCreate(&s));
        for (int i = 0; i < 20; ++i) {
          int32_t values[2] = {rank + i, 0}, sum = 0, most = 0;
          MOECCL_ASSERT_OK(moecclGroupStart());
          MOECCL_EXPECT_COMM_OK(moecclAllReduce(&values[0], &sum, 1, moecclInt32, moecclSum, comm, streams[0]), comm);
          MOECCL_EXPECT_COMM_OK(moecclBroadcast(&values[0], &values[1], 1, moecclInt32, 1, comm, streams[rank]), comm);
          MOECCL_EXPECT_COMM_OK(moecclAllReduce(&values[0], &most, 1, moecclInt32, moecclMax, comm, streams[0]), comm);
          MOECCL_ASSERT_OK(moecclGroupEnd());
          int32_t total = 0;
          MOECCL_EXPECT_COMM_OK(moecclAllReduce(&most, &total, 1, moecclInt32, moecclSum, comm, streams[rank]), comm);
          MOECCL_EXPECT_COMM_OK(moecclStreamSynchronize(streams[rank]), comm);
          EXPECT_EQ(sum, 2 * i + 1);
          EXPECT_EQ(values[1], i + 1);
          EXPECT_EQ(total, 2 * (i + 1));
        }
        for (moecclStream_t s : streams) MOECCL_EXPECT_OK(moecclStreamDestroy(s));
      },
      {.mode = GetParam()});
}

TEST_P(ApiMessages, DestroyingAStreamFinishesItsOperations) {
  run_ranks(2,
            [](int, moecclComm_t comm) {
              moecclStream_t stream = nullptr;
              MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
              int32_t value = 21;
              MOECCL_ASSERT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclInt32, moecclSum, comm, stream), comm);
              MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
              EXPECT_EQ(value, 42);
            },
            {.mode = GetParam()});
}

TEST_P(ApiMessages, ScalarsOfPreMulSumAreEachRanksOwn) {
  run_ranks(3,
            [](int rank, moecclComm_t comm) {
              moecclRedOp_t op = 0;
              float scale = static_cast<float>(rank + 1);
              MOECCL_ASSERT_COMM_OK(moecclRedOpCreatePreMulSum(&op, &scale, moecclFloat32, comm), comm);
              scale = 1000;  // read at once
              EXPECT_GE(op, MOECCL_NUM_REDUCTIONS);
              for (size_t count : {size_t{3}, size_t{100'000}}) {
                std::vector<float> in(count, 10), out(count);
                MOECCL_ASSERT_COMM_OK(moecclAllReduce(in.data(), out.data(), count, moecclFloat32, op, comm, nullptr),
                                      comm);
                EXPECT_EQ(out.front(), 60.0f);
                EXPECT_EQ(out.back(), 60.0f);
                EXPECT_EQ(in.front(), 10.0f) << "the input is the caller's";
              }
              MOECCL_EXPECT_COMM_OK(moecclRedOpDestroy(op, comm), comm);
            },
            {.mode = GetParam()});
}

INSTANTIATE_TEST_SUITE_P(Modes, ApiMessages, ::testing::Values(RankMode::kThreads, RankMode::kProcesses),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

TEST(ApiGroup, EndWithoutStartIsAUsageError) {
  run_ranks(1, [](int, moecclComm_t) { EXPECT_EQ(moecclGroupEnd(), moecclInvalidUsage); });
}

TEST(ApiGroup, NestsAndTheOutermostEndIssues) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    int32_t out = rank, in = -1;
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclSend(&out, 1, moecclInt32, 1 - rank, comm, nullptr), comm);
    MOECCL_ASSERT_OK(moecclGroupEnd());  // issues nothing: the peer's Recv is not there yet
    MOECCL_EXPECT_COMM_OK(moecclRecv(&in, 1, moecclInt32, 1 - rank, comm, nullptr), comm);
    MOECCL_ASSERT_OK(moecclGroupEnd());
    EXPECT_EQ(in, 1 - rank);
  });
}

// If one communicator of a group fails before the group runs, no other one may go on as if its call had not been made.
TEST(ApiGroup, ThatCannotRunFailsAllItsCommunicators) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              moecclComm_t other = nullptr;
              MOECCL_ASSERT_OK(moecclCommSplit(comm, 0, rank, &other, nullptr));
              const int32_t one = 1, later = 100;
              int32_t sums[2] = {-1, -1}, next = -1;
              MOECCL_ASSERT_OK(moecclGroupStart());
              MOECCL_EXPECT_OK(moecclAllReduce(&one, &sums[0], 1, moecclInt32, moecclSum, other, nullptr));
              MOECCL_EXPECT_OK(moecclAllReduce(&one, &sums[1], 1, moecclInt32, moecclSum, comm, nullptr));
              if (rank == 0) {
                MOECCL_EXPECT_OK(moecclCommAbort(comm));
              }
              EXPECT_EQ(moecclGroupEnd(), rank == 0 ? moecclAborted : moecclRemoteError);
              EXPECT_EQ(moecclAllReduce(&later, &next, 1, moecclInt32, moecclSum, other, nullptr), moecclRemoteError);
              EXPECT_EQ(sums[0], -1) << "it would hold another call's data";
              MOECCL_EXPECT_OK(moecclCommDestroy(other));
              MOECCL_EXPECT_OK(moecclCommDestroy(comm));
            },
            {.destroy = false});
}

TEST(ApiGroup, ACommunicatorsLastErrorSaysWhyItsGroupWasNotIssued) {
  run_ranks(1, [](int, moecclComm_t comm) {
    int32_t value = 1;
    const auto end_says = [&](const char* word) {
      EXPECT_NE(moecclGroupEnd(), moecclSuccess);
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(word), std::string::npos) << moecclGetLastError(comm);
    };
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclSend(&value, 1, moecclInt32, 0, comm, nullptr), comm);
    end_says("does not send to itself as often");
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclInt32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(moecclAllReduce(&value, &value, 1, moecclInt32, moecclSum, nullptr, nullptr), moecclInvalidArgument);
    end_says("comm is NULL");
  });
}

TEST(ApiGroup, ABadCallInAGroupIssuesNothing) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    int32_t out = rank, in = -1;
    MOECCL_ASSERT_OK(moecclGroupStart());
    MOECCL_EXPECT_COMM_OK(moecclSend(&out, 1, moecclInt32, 1 - rank, comm, nullptr), comm);
    EXPECT_EQ(moecclRecv(&in, 1, moecclInt32, 17, comm, nullptr), moecclInvalidArgument);
    EXPECT_EQ(moecclGroupEnd(), moecclInvalidArgument);
    MOECCL_ASSERT_COMM_OK(moecclAllReduce(&out, &in, 1, moecclInt32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(in, 1);
  });
}

}  // namespace
}  // namespace moeccl::testing
