// SPDX-License-Identifier: Apache-2.0
// Abort from another thread at random points: abort and the operation return within 1 s, also beside a dead or stopped
// rank, and the peers learn which rank aborted. Also threads that are cancelled inside a call.
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4;
constexpr int kLimitMs = 1000;

// Loops over collectives until one fails, and returns its result.
moecclResult_t run_until_failure(moecclComm_t comm, size_t count) {
  std::vector<float> data(count, 0);
  for (int64_t end = fair_now_ms() + patient_ms(20'000); fair_now_ms() < end;) {
    const moecclResult_t r = moecclAllReduce(data.data(), data.data(), count, moecclFloat32, moecclSum, comm, nullptr);
    if (r != moecclSuccess) return r;
  }
  ADD_FAILURE() << "no failure in 20 s";
  return moecclSuccess;
}

void abort_once(RankMode mode, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int victim = static_cast<int>(random() % kRanks);
  const int delay_us = static_cast<int>(random() % 20'000);
  const size_t count = size_t{1} << (random() % 20);
  Shared<std::atomic<int64_t>> aborted_ms;
  run_ranks(kRanks,
            [&](int rank, moecclComm_t comm) {
              std::thread killer;
              if (rank == victim) {
                killer = std::thread([&, comm] {
                  std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
                  const Stopwatch watch;
                  aborted_ms->store(fair_now_ms());
                  EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
                  MOECCL_EXPECT_WITHIN(watch, kLimitMs) << ", abort itself";
                });
              }
              const moecclResult_t result = run_until_failure(comm, count);
              const int64_t waited = fair_now_ms() - aborted_ms->load();
              EXPECT_LE(waited, patient_ms(rank == victim ? kLimitMs : 2 * kLimitMs)) << "rank " << rank;
              const std::string text = moecclGetLastError(comm);
              if (rank == victim) {
                EXPECT_EQ(result, moecclAborted) << text;
                killer.join();
              } else {
                EXPECT_EQ(result, moecclRemoteError) << moecclGetErrorString(result) << ": " << text;
                EXPECT_NE(text.find("rank " + std::to_string(victim)), std::string::npos) << text;
              }
              moecclResult_t state = moecclSuccess;
              EXPECT_EQ(moecclCommGetAsyncError(comm, &state), moecclSuccess);
              EXPECT_EQ(state, result);
            },
            {.mode = mode, .deadline_ms = 40'000});
}

TEST(Abort, FromAnotherThreadEndsEveryRankInTime) {
  const int n = scaled(84);
  for (int i = 0; i < n && !::testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", abort " << i);
    const RankMode mode = i % 3 == 0 ? RankMode::kProcesses : i % 3 == 1 ? RankMode::kThreads : RankMode::kMixed;
    abort_once(mode, test_seed() * 1000 + static_cast<uint64_t>(i));
  }
}

// A rank aborts whose peer is dead or stopped: no rank waits for it, and the third and fourth rank name one of
// the two. `signal` is SIGKILL or SIGSTOP.
void abort_beside(int signal, bool between_hosts, uint64_t seed) {
  std::mt19937_64 random(seed);
  const int gone = static_cast<int>(random() % kRanks), aborts = (gone + 1 + static_cast<int>(random() % 3)) % kRanks;
  const size_t count = size_t{1} << (random() % 20);
  // Before or after the others have noticed a death.
  const auto delay = std::chrono::milliseconds(signal == SIGKILL ? random() % 40 : 100);
  SCOPED_TRACE(::testing::Message() << "rank " << gone << " gets signal " << signal << ", rank " << aborts << " aborts "
                                    << delay.count() << " ms later");
  std::string why;
  const auto hosts = between_hosts ? TestHosts::create({.weights = {1, 1}, .named = true}, &why) : nullptr;
  Shared<std::atomic<int64_t>> signalled_ms;
  Meeting ended;
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000};
  options.hosts = hosts.get();
  if (signal == SIGKILL) options.may_die = {gone};
  options.on_running = [&](const std::vector<pid_t>& pids) {
    const pid_t pid = pids[static_cast<size_t>(gone)];
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    kill(pid, signal);
    signalled_ms->store(fair_now_ms());
    EXPECT_TRUE(ended.wait_for(kRanks - 1));
    if (signal == SIGSTOP) kill(pid, SIGCONT);
  };
  run_ranks(
      kRanks,
      [&](int rank, moecclComm_t comm) {
        std::thread killer;
        if (rank == aborts) {
          killer = std::thread([&, comm] {
            while (signalled_ms->load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
            std::this_thread::sleep_for(delay);
            const Stopwatch watch;
            EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
            MOECCL_EXPECT_WITHIN(watch, kLimitMs) << ", abort itself";
          });
        }
        const moecclResult_t result = run_until_failure(comm, count);
        const std::string text = moecclGetLastError(comm);
        if (killer.joinable()) killer.join();
        if (rank == gone) return;  // it goes on when the others have ended
        EXPECT_LE(fair_now_ms() - signalled_ms->load(), patient_ms(delay.count() + kLimitMs)) << "rank " << rank;
        EXPECT_TRUE(result == moecclRemoteError || (rank == aborts && result == moecclAborted)) << text;
        EXPECT_TRUE(rank == aborts || text.find("rank " + std::to_string(aborts)) != std::string::npos ||
                    (signal == SIGKILL && text.find("rank " + std::to_string(gone)) != std::string::npos))
            << text;
        const Stopwatch watch;
        EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
        MOECCL_EXPECT_WITHIN(watch, kLimitMs) << ", abort afterwards";
        ended.arrive();
      },
      options);
}

TEST(Abort, DoesNotWaitForADeadRank) {
  for (int i = 0; i < 2 * scaled(8) && !HasFailure(); ++i)
    abort_beside(SIGKILL, i % 2 == 1, test_seed() * 1000 + static_cast<uint64_t>(i));
}
TEST(Abort, DoesNotWaitForAStoppedRank) {
  for (int i = 0; i < 2 * scaled(8) && !HasFailure(); ++i)
    abort_beside(SIGSTOP, i % 2 == 1, test_seed() * 1000 + static_cast<uint64_t>(i));
}

// The peers have not come at all, so the wait that is aborted has no peer to inform.
TEST(Abort, EndsAWaitForARankThatNeverComes) {
  Meeting ended;
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    if (rank == 1) {
      EXPECT_TRUE(ended.wait_for(1));
      return;
    }
    std::thread killer([comm] {
      std::this_thread::sleep_for(std::chrono::milliseconds(200));
      EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
    });
    const Stopwatch watch;
    float value = 1;
    EXPECT_EQ(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr), moecclAborted);
    MOECCL_EXPECT_WITHIN(watch, 200 + kLimitMs);
    ended.arrive();
    killer.join();
  });
}

TEST(Abort, EndsOperationsOnStreams) {
  Meeting ended;
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    if (rank == 1) {
      EXPECT_TRUE(ended.wait_for(1));
      return;
    }
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    float value = 1;
    for (int i = 0; i < 3; ++i) {
      MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, stream), comm);
    }
    const Stopwatch watch;
    EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
    EXPECT_EQ(moecclStreamSynchronize(stream), moecclAborted);
    MOECCL_EXPECT_WITHIN(watch, kLimitMs);
    ended.arrive();
    EXPECT_EQ(moecclStreamDestroy(stream), moecclSuccess);
  });
}

TEST(Abort, LeavesOtherCommunicatorsAlone) {
  run_ranks(3, [](int rank, moecclComm_t comm) {
    moecclComm_t other = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &other, nullptr), comm);
    if (rank == 0) {
      EXPECT_EQ(moecclCommAbort(other), moecclSuccess);
    }
    float value = 1;
    MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
    EXPECT_EQ(value, 3.0f);
    EXPECT_NE(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, other, nullptr), moecclSuccess);
    EXPECT_EQ(moecclCommDestroy(other), moecclSuccess);
  });
}

// One thread drives the operations of both until the last one has ended.
TEST(Abort, OfAShrinkDoesNotWaitForTheRestOfItsGroup) {
  Meeting ended;
  run_ranks(2, [&](int rank, moecclComm_t comm) {
    moecclComm_t other = nullptr, left = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &other, nullptr), comm);
    if (rank == 0) {
      float value[2] = {};
      std::thread caller([&] {
        MOECCL_ASSERT_OK(moecclGroupStart());
        for (int i = 0; i < 2; ++i)
          MOECCL_ASSERT_OK(
              moecclAllReduce(&value[i], &value[i], 1, moecclFloat32, moecclSum, i == 0 ? comm : other, 0));
        EXPECT_EQ(moecclGroupEnd(), moecclAborted);
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      const int gone = 1;
      const Stopwatch watch;
      MOECCL_EXPECT_COMM_OK(moecclCommShrink(comm, &gone, 1, &left, nullptr, MOECCL_SHRINK_ABORT), comm);
      MOECCL_EXPECT_WITHIN(watch, 2000 + kLimitMs);
      EXPECT_EQ(moecclCommAbort(other), moecclSuccess);
      caller.join();
      ended.arrive();
      EXPECT_EQ(moecclCommDestroy(left), moecclSuccess);
    }
    EXPECT_TRUE(ended.wait_for(1));
    EXPECT_EQ(moecclCommDestroy(other), moecclSuccess);
  });
}

// The object has a communicator that its caller cannot name. Rank 1 is alive and begins no round.
TEST(Abort, OrARevocationEndsAnExpertSwapOfTheCommunicator) {
  for (const bool revokes : {false, true})
    for (const bool destroys : {false, true}) {
      SCOPED_TRACE(std::string(revokes ? "revoked, " : "aborted, ") + (destroys ? "destroy" : "finish"));
      Meeting ended;
      run_ranks(2, [&](int rank, moecclComm_t comm) {
        moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
        layer.hidden_bytes = 4, layer.top_k = 1, layer.n_experts = 2, layer.max_tokens = 1;
        moecclMoe_t moe = nullptr;
        moecclExpertSwap_t swap = nullptr;
        moecclExpertSwapConfig_t config = MOECCL_EXPERT_SWAP_CONFIG_INIT;
        config.interval = 1;
        MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &layer), comm);
        MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);
        MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe, nullptr, 0, nullptr, nullptr), comm);
        if (rank == 1) {
          EXPECT_TRUE(ended.wait_for(1));
        } else {
          MOECCL_EXPECT_COMM_OK(moecclExpertSwapBegin(swap), comm);
          std::thread watchdog([=] {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            EXPECT_EQ(revokes ? moecclCommRevoke(comm) : moecclCommAbort(comm), moecclSuccess);
          });
          const Stopwatch watch;
          if (destroys)
            EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
          else
            EXPECT_EQ(moecclExpertSwapFinish(swap, nullptr), moecclAborted) << moecclGetLastError(nullptr);
          MOECCL_EXPECT_WITHIN(watch, 200 + kLimitMs);
          watchdog.join();
          ended.arrive();
        }
        if (rank == 1 || !destroys) {
          EXPECT_EQ(moecclExpertSwapDestroy(swap), moecclSuccess);
        }
        EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
      });
    }
}

TEST(Abort, OrARevocationEndsAGrowThatWaitsForANewRank) {
  for (const bool revokes : {false, true}) {
    SCOPED_TRACE(revokes ? "revoked" : "aborted");
    run_ranks(2, [&](int rank, moecclComm_t comm) {
      moecclUniqueId id;
      if (rank == 0) {
        MOECCL_ASSERT_COMM_OK(moecclCommGetUniqueId(comm, &id), comm);
      }
      std::thread watchdog([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        if (rank == 0) {
          EXPECT_EQ(revokes ? moecclCommRevoke(comm) : moecclCommAbort(comm), moecclSuccess);
        }
      });
      const Stopwatch watch;
      moecclComm_t grown = nullptr;
      const moecclResult_t result = moecclCommGrow(comm, 3, rank == 0 ? &id : nullptr, -1, &grown, nullptr);
      if (rank == 0 || revokes) {
        EXPECT_EQ(result, moecclAborted) << moecclGetLastError(comm);
      } else {
        EXPECT_NE(result, moecclSuccess);
      }
      MOECCL_EXPECT_WITHIN(watch, 300 + kLimitMs);
      watchdog.join();
    });
  }
}

// Rank 0 cancels the thread that calls. The peer gets the answer of each call that has begun.
void cancel_a_caller(bool between_hosts, int peer_comes_late_ms) {
  SCOPED_TRACE(::testing::Message() << (between_hosts ? "two hosts" : "one host") << ", the peer comes "
                                    << peer_comes_late_ms << " ms late");
  std::string why;
  const auto hosts = between_hosts ? TestHosts::create({.weights = {1, 1}, .named = true}, &why) : nullptr;
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000};
  options.hosts = hosts.get();
  Shared<std::atomic<int>> begun, answered;  // calls of rank 0, and of rank 1
  run_ranks(
      2,
      [&](int rank, moecclComm_t comm) {
        std::vector<float> data(1 << 18, 1);
        const auto call = [&] {
          return moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclMax, comm, nullptr);
        };
        const auto late = std::chrono::milliseconds(rank == 1 ? peer_comes_late_ms : 0);
        if (rank == 1) {
          for (std::this_thread::sleep_for(late); call() == moecclSuccess; std::this_thread::sleep_for(late))
            ++*answered;
          return;
        }
        std::thread caller([&] {
          for (;;) {
            ++*begun;
            MOECCL_EXPECT_COMM_OK(call(), comm);
            pthread_testcancel();
          }
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        EXPECT_EQ(pthread_cancel(caller.native_handle()), 0);
        caller.join();
        for (int64_t end = fair_now_ms() + patient_ms(5000); *answered < *begun && fair_now_ms() < end;)
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
        EXPECT_EQ(answered->load(), begun->load());
        MOECCL_EXPECT_OK(moecclCommAbort(comm));
      },
      options);
}

TEST(Cancellation, ActsWhenTheCallHasEnded) {
  for (int i = 0; i < scaled(4) && !HasFailure(); ++i) {
    for (const bool between_hosts : {false, true})
      for (const int late_ms : {0, 300}) cancel_a_caller(between_hosts, late_ms);
  }
}

TEST(Abort, TwiceAndBeforeDestroyIsFine) {
  run_ranks(1, [](int, moecclComm_t comm) {
    EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
    EXPECT_EQ(moecclCommAbort(comm), moecclSuccess);
    float value = 1;
    EXPECT_EQ(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr), moecclAborted);
  });
}

}  // namespace
}  // namespace moeccl::testing
