// SPDX-License-Identifier: Apache-2.0
// Handles in groups, with other threads, after a fork and at the end of the program: errors, never a crash or a hang.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

const RankOptions kNoInit{.init = false};

void expect_refused(moecclResult_t got, const char* mentions) {
  EXPECT_EQ(got, moecclInvalidUsage) << moecclGetErrorString(got);
  const std::string text = moecclGetLastError(nullptr);
  EXPECT_NE(text.find(mentions), std::string::npos) << "\"" << text << "\" does not mention " << mentions;
}

moecclResult_t all_reduce(const float* in, float* out, moecclComm_t comm, moecclStream_t stream = nullptr) {
  return moecclAllReduce(in, out, 1, moecclFloat32, moecclSum, comm, stream);
}

void expect_usable(moecclComm_t comm) {
  float value = 3, sum = 0;
  MOECCL_EXPECT_COMM_OK(all_reduce(&value, &sum, comm), comm);
  EXPECT_EQ(sum, 3.0f);
}

TEST(ApiGroups, WhatAGroupHoldsIsNotDestroyed) {
  run_ranks(
      1,
      [](int, moecclComm_t) {
        moecclComm_t comm = nullptr;
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclCommInitAll(&comm, 1, nullptr));
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        moecclHybrid_t hybrid = nullptr;
        moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
        const int32_t domain = 1;
        config.n_experts = 2, config.domain = &domain, config.n_levels = 1;
        MOECCL_ASSERT_OK(moecclHybridCreate(&hybrid, comm, &config));
        const float in = 3, own[2] = {4, 5};
        float blocking = 0, streamed = 0, held[2] = {};
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(all_reduce(&in, &blocking, comm));
        MOECCL_EXPECT_OK(all_reduce(&in, &streamed, comm, stream));
        MOECCL_EXPECT_OK(moecclHybridGather(hybrid, own, held, sizeof(float), nullptr));
        expect_refused(moecclCommDestroy(comm), "3 calls on this communicator: call moecclGroupEnd");
        expect_refused(moecclStreamDestroy(stream), "1 call on this stream");
        expect_refused(moecclHybridDestroy(hybrid), "1 call on this placement");
        // Another thread cannot destroy it either.
        std::thread([&] { expect_refused(moecclCommDestroy(comm), "group"); }).join();
        EXPECT_EQ(blocking, 0.0f) << "nothing runs before the group's end";
        MOECCL_EXPECT_OK(moecclGroupEnd());
        MOECCL_EXPECT_OK(moecclStreamSynchronize(stream));
        EXPECT_EQ(blocking, 3.0f);
        EXPECT_EQ(streamed, 3.0f);
        EXPECT_EQ(held[1], 5.0f);
        MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      kNoInit);
}

// An operator's scalar and a routing's choices are read at the call, and an aborted communicator still exists.
TEST(ApiGroups, OperatorsMayGoAndCommunicatorsMayBeAborted) {
  run_ranks(
      1,
      [](int, moecclComm_t) {
        moecclComm_t comm = nullptr;
        MOECCL_ASSERT_OK(moecclCommInitAll(&comm, 1, nullptr));
        moecclRedOp_t twice{};
        const float two = 2, in = 3;
        float out = 0;
        MOECCL_ASSERT_OK(moecclRedOpCreatePreMulSum(&twice, &two, moecclFloat32, comm));
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(moecclAllReduce(&in, &out, 1, moecclFloat32, twice, comm, nullptr));
        MOECCL_EXPECT_OK(moecclRedOpDestroy(twice, comm));
        MOECCL_EXPECT_OK(moecclGroupEnd());
        EXPECT_EQ(out, 6.0f);
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(all_reduce(&in, &out, comm));
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
        EXPECT_EQ(moecclGroupEnd(), moecclAborted);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      kNoInit);
}

TEST(ApiGroups, ACancelledGroupIssuesNothingAndHoldsNothing) {
  run_ranks(
      1,
      [](int, moecclComm_t) {
        moecclComm_t comm = nullptr, joined = nullptr;
        MOECCL_ASSERT_OK(moecclCommInitAll(&comm, 1, nullptr));
        const float in = 3;
        float out = 0;
        EXPECT_EQ(moecclGroupCancel(), moecclInvalidUsage) << "no group is open";
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_EXPECT_OK(all_reduce(&in, &out, comm));
        MOECCL_EXPECT_OK(moecclCommInitRank(&joined, 1, unique_id(), 0));
        MOECCL_EXPECT_OK(moecclGroupCancel());
        EXPECT_EQ(moecclGroupEnd(), moecclInvalidUsage) << "all groups are gone";
        EXPECT_EQ(out, 0.0f);
        EXPECT_EQ(joined, nullptr);
        expect_usable(comm);
        // A thread that ends keeps no hold on the communicator.
        std::thread([&] {
          MOECCL_ASSERT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(all_reduce(&in, &out, comm));
        }).join();
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      kNoInit);
}

TEST(ApiGroups, ARefusedCallFailsTheWholeGroup) {
  run_ranks(1, [](int, moecclComm_t comm) {
    const float in = 3;
    float out = 0;
    moecclComm_t other = nullptr;
    moecclMoe_t moe = nullptr;
    const auto dead = reinterpret_cast<moecclComm_t>(uintptr_t{0x12c1});
    const auto dead_stream = reinterpret_cast<moecclStream_t>(uintptr_t{0x12c2});
    moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
    layer.hidden_bytes = 64, layer.top_k = 1, layer.n_experts = 2, layer.max_tokens = 2;
    const std::vector<std::pair<moecclResult_t, std::function<moecclResult_t()>>> refused = {
        {moecclInvalidArgument,
         [&] { return moecclAllReduce(nullptr, &out, 1, moecclFloat32, moecclSum, comm, nullptr); }},
        {moecclInvalidArgument, [&] { return all_reduce(&in, &out, dead); }},
        {moecclInvalidArgument, [&] { return all_reduce(&in, &out, comm, dead_stream); }},
        {moecclInvalidArgument, [&] { return moecclSend(&in, 1, moecclFloat32, 5, comm, nullptr); }},
        {moecclInvalidArgument, [&] { return moecclCommInitRank(&other, 0, unique_id(), 0); }},
        {moecclInvalidUsage, [&] { return moecclCommSplit(comm, 0, 0, &other, nullptr); }},
        {moecclInvalidUsage, [&] { return moecclMoeCreate(&moe, comm, &layer); }},
    };
    for (const auto& [code, call] : refused) {
      MOECCL_ASSERT_OK(moecclGroupStart());
      MOECCL_EXPECT_OK(all_reduce(&in, &out, comm));
      EXPECT_EQ(call(), code);
      const std::string sentence = moecclGetLastError(nullptr);
      EXPECT_EQ(moecclGroupEnd(), code);
      EXPECT_EQ(moecclGetLastError(nullptr), sentence);
      EXPECT_EQ(out, 0.0f) << sentence;
    }
    expect_usable(comm);
  });
}

TEST(ApiLifetime, NullMayBeDestroyed) {
  run_ranks(1, [](int, moecclComm_t) {
    MOECCL_EXPECT_OK(moecclCommDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclStreamDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclMoeDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclRoutingDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclHybridDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclMigrationDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclGradientReturnDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclReplaceDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclSampleSolverDestroy(nullptr));
    MOECCL_EXPECT_OK(moecclMemFree(nullptr));
  });
}

TEST(ApiLifetime, RegistrationsAreGivenBackOnceAndToTheirCommunicator) {
  run_ranks(1, [](int, moecclComm_t comm) {
    static char memory[100];
    void *a = nullptr, *b = nullptr;
    EXPECT_EQ(moecclCommRegister(comm, memory, SIZE_MAX, &a), moecclInvalidArgument);
    EXPECT_EQ(moecclCommRegister(comm, memory, SIZE_MAX / 2, &a), moecclInvalidArgument);
    EXPECT_EQ(a, nullptr);
    MOECCL_ASSERT_OK(moecclCommRegister(comm, memory, sizeof(memory), &a));
    MOECCL_ASSERT_OK(moecclCommRegister(comm, memory, sizeof(memory), &b));
    EXPECT_NE(a, b);
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_OK(moecclCommInitAll(&other, 1, nullptr));
    EXPECT_EQ(moecclCommDeregister(other, a), moecclInvalidArgument) << "another communicator's";
    MOECCL_EXPECT_OK(moecclCommDestroy(other));
    EXPECT_EQ(moecclCommDeregister(comm, memory), moecclInvalidArgument);
    EXPECT_EQ(moecclCommDeregister(comm, reinterpret_cast<void*>(1)), moecclInvalidArgument);
    MOECCL_EXPECT_OK(moecclCommDeregister(comm, a));
    EXPECT_EQ(moecclCommDeregister(comm, a), moecclInvalidArgument) << "twice";
    MOECCL_EXPECT_OK(moecclCommDeregister(comm, b));
  });
}

// types.h: any thread may call abort, the asynchronous error and the last error at any time.
TEST(ApiLifetime, WatchdogsWorkWhileTheOwnerDestroys) {
  run_ranks(
      1,
      [](int, moecclComm_t) {
        std::atomic<moecclComm_t> shared{nullptr};
        std::atomic<bool> stop{false};
        std::atomic<uint64_t> answered{0}, bad{0};
        const auto watch = [&](bool aborts) {
          while (!stop) {
            const moecclComm_t comm = shared;
            moecclResult_t state = moecclSuccess;
            const moecclResult_t asked = moecclCommGetAsyncError(comm, &state);
            const moecclResult_t aborted = aborts ? moecclCommAbort(comm) : moecclSuccess;
            if (strlen(moecclGetLastError(comm)) > 1000) ++bad;
            for (const moecclResult_t r : {asked, aborted})
              if (r != moecclSuccess && r != moecclInvalidArgument) ++bad;
            if (asked == moecclSuccess) ++answered;
          }
        };
        std::vector<std::thread> watchdogs;
        for (int i = 0; i < 3; ++i) watchdogs.emplace_back(watch, i > 0);
        for (int round = 0; round < scaled(200); ++round) {
          moecclComm_t comm = nullptr;
          moecclConfig_t config = MOECCL_CONFIG_INIT;
          config.staging_bytes = 65536;
          MOECCL_ASSERT_OK(moecclCommInitAll(&comm, 1, &config));
          shared = comm;
          usleep(static_cast<useconds_t>(round % 7 * 30));
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        }
        stop = true;
        for (std::thread& t : watchdogs) t.join();
        EXPECT_GT(answered, 0u);
        EXPECT_EQ(bad, 0u);
      },
      kNoInit);
}

// A destroy waits for the work on streams. If the peer never comes, it would wait for the operation's whole timeout.
TEST(ApiLifetime, AnAbortEndsADestroyThatWaits) {
  Meeting done;
  RankOptions options{.destroy = false};
  options.config.timeout_ms = 60'000;
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        if (rank == 1) {
          done.wait_for(1);
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          return;
        }
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        const float in = 1;
        float out = 0;
        MOECCL_ASSERT_OK(all_reduce(&in, &out, comm, stream));
        std::thread watchdog([comm] {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
        });
        const Stopwatch watch;
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        MOECCL_EXPECT_WITHIN(watch, 5000);
        watchdog.join();
        EXPECT_EQ(moecclStreamSynchronize(stream), moecclAborted);
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
        done.arrive();
      },
      options);
}

// Runs body(comm, stream, aborted) on rank 0. The stream is busy with an operation of another communicator, for which
// rank 1 comes when the body has let `aborted` know.
void beside_a_busy_stream(const std::function<void(moecclComm_t, moecclStream_t, Meeting&)>& body) {
  Meeting aborted;
  RankOptions options;
  options.config.timeout_ms = 60'000;
  run_ranks(
      2,
      [&](int rank, moecclComm_t busy) {
        moecclComm_t comm = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclCommSplit(busy, 0, rank, &comm, nullptr), busy);
        const float in = 1;
        float first = 0;
        if (rank == 1) {
          EXPECT_TRUE(aborted.wait_for(1));
          MOECCL_EXPECT_COMM_OK(all_reduce(&in, &first, busy), busy);
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          return;
        }
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        MOECCL_ASSERT_OK(all_reduce(&in, &first, busy, stream));
        body(comm, stream, aborted);
        if (::testing::Test::HasFatalFailure()) return;
        EXPECT_EQ(moecclStreamSynchronize(stream), moecclAborted);
        EXPECT_EQ(first, 2.0f) << "the other communicator's operation";
        MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
      },
      options);
}

// What has not begun, because its stream is busy with another communicator's work, does not hold up an abort.
TEST(ApiLifetime, AnAbortDropsWhatWaitsBehindAnotherCommunicator) {
  float second = 0, grouped = 0;
  beside_a_busy_stream([&](moecclComm_t comm, moecclStream_t stream, Meeting& aborted) {
    const float in = 1;
    MOECCL_ASSERT_OK(all_reduce(&in, &second, comm, stream));
    MOECCL_ASSERT_OK(moecclGroupStart());
    for (int i = 0; i < 2; ++i) MOECCL_ASSERT_OK(all_reduce(&in, &grouped, comm, stream));
    MOECCL_ASSERT_OK(moecclGroupEnd());
    const Stopwatch watch;
    MOECCL_EXPECT_OK(moecclCommAbort(comm));
    MOECCL_EXPECT_OK(moecclCommDestroy(comm));
    MOECCL_EXPECT_WITHIN(watch, 5000);
    aborted.arrive();
  });
  EXPECT_EQ(second + grouped, 0.0f);
}

// Calls of a group on several streams meet, and an abort ends the meeting although one stream is busy with another
// communicator's work.
TEST(ApiLifetime, AnAbortEndsAGroupThatWaitsForABusyStream) {
  for (const bool on_thread : {true, false}) {
    for (const bool busy_runs : {false, true}) {
      float grouped[2] = {};
      beside_a_busy_stream([&](moecclComm_t comm, moecclStream_t late, Meeting& aborted) {
        const float in = 1;
        moecclStream_t other = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&other));
        const moecclStream_t free = on_thread ? nullptr : other;
        MOECCL_ASSERT_OK(moecclGroupStart());
        MOECCL_ASSERT_OK(all_reduce(&in, &grouped[0], comm, busy_runs ? late : free));
        MOECCL_ASSERT_OK(all_reduce(&in, &grouped[1], comm, busy_runs ? free : late));
        std::thread watchdog([comm] {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          MOECCL_EXPECT_OK(moecclCommAbort(comm));
        });
        const Stopwatch watch;
        EXPECT_EQ(moecclGroupEnd(), on_thread ? moecclAborted : moecclSuccess);
        EXPECT_EQ(moecclStreamSynchronize(other), on_thread ? moecclSuccess : moecclAborted);
        MOECCL_EXPECT_WITHIN(watch, 5000);
        watchdog.join();
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        MOECCL_EXPECT_WITHIN(watch, 5000);
        aborted.arrive();
        MOECCL_EXPECT_OK(moecclStreamDestroy(other));
      });
      EXPECT_EQ(grouped[0] + grouped[1], 0.0f);
    }
  }
}

// One expression may use several communicators' sentences, as in a call of printf.
TEST(ApiLifetime, LastErrorsStayForTheNextSevenCalls) {
  run_ranks(1, [](int, moecclComm_t comm) {
    EXPECT_EQ(moecclPlanForce(comm, moecclOpAllReduce, "no such plan"), moecclInvalidArgument);
    const char* const first = moecclGetLastError(comm);
    for (int i = 0; i < 7; ++i) EXPECT_STRNE(moecclGetLastError(nullptr), "");
    EXPECT_NE(std::string(first).find("no such plan"), std::string::npos) << first;
  });
}

}  // namespace
}  // namespace moeccl::testing
