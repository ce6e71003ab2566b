// SPDX-License-Identifier: Apache-2.0
// Shrink, grow and revoke: the members of the result, and refused calls. churn_test.cc repeats them,
// tests/fault/shrink_test.cc tests survivors of kills, and MOECCL_TEST_COMM runs whole suites on shrunk and grown
// communicators.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/conformance/members.h"

namespace moeccl::testing {
namespace {

struct SharedId {
  moecclUniqueId id;
  std::atomic<int> made;
  void wait() const {
    while (made.load() == 0) usleep(500);
  }
};

class Elastic : public ::testing::TestWithParam<RankMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, Elastic, ::testing::Values(RankMode::kThreads, RankMode::kProcesses, RankMode::kMixed),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

TEST_P(Elastic, NamedRanksStayAwayAndTheOthersKeepTheirOrder) {
  run_ranks(5,
            [](int rank, moecclComm_t comm) {
              const int away[] = {3, 1, 3};
              if (rank == 1 || rank == 3) {
                EXPECT_EQ(sum_of(rank, comm), 10) << "the parent works as before";
                return;
              }
              moecclComm_t left = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, away, 3, &left, nullptr, MOECCL_SHRINK_DEFAULT), comm);
              expect_place(left, rank / 2, 3);
              EXPECT_EQ(sum_of(rank, left), 6);
              EXPECT_EQ(sum_of(rank, comm), 10);
              MOECCL_EXPECT_OK(moecclCommDestroy(left));
            },
            {.mode = GetParam()});
}

TEST_P(Elastic, WithoutNamesAllWhoAreThereStayAndWhoHasLeftDoesNot) {
  Meeting left_already;
  run_ranks(4,
            [&](int rank, moecclComm_t comm) {
              moecclComm_t all = nullptr, left = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, nullptr, 0, &all, nullptr, MOECCL_SHRINK_DEFAULT), comm);
              expect_place(all, rank, 4);
              if (rank == 0) {
                MOECCL_EXPECT_OK(moecclCommDestroy(all));
                left_already.arrive();
                return;
              }
              EXPECT_TRUE(left_already.wait_for(1));
              MOECCL_ASSERT_COMM_OK(moecclCommShrink(all, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT), all);
              expect_place(left, rank - 1, 3);
              EXPECT_EQ(sum_of(1, left), 3);
              MOECCL_EXPECT_OK(moecclCommDestroy(left));
              MOECCL_EXPECT_OK(moecclCommDestroy(all));
            },
            {.mode = GetParam()});
}

TEST_P(Elastic, AnAbortedOrRevokedCommunicatorIsShrunk) {
  for (const bool revoke : {false, true}) {
    run_ranks(3,
              [&](int rank, moecclComm_t comm) {
                if (rank == 1) {
                  usleep(2000);
                  MOECCL_EXPECT_OK(revoke ? moecclCommRevoke(comm) : moecclCommAbort(comm));
                } else {
                  int32_t word = 0;
                  const moecclResult_t result = moecclRecv(&word, 1, moecclInt32, 1, comm, nullptr);
                  EXPECT_EQ(result, revoke ? moecclAborted : moecclRemoteError) << moecclGetLastError(comm);
                  EXPECT_TRUE(says(comm, revoke ? "rank 1 revoked the communicator" : "rank 1 aborted"))
                      << moecclGetLastError(comm);
                }
                moecclComm_t left = nullptr;
                const int flags = rank == 0 ? MOECCL_SHRINK_ABORT : MOECCL_SHRINK_DEFAULT;
                MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, nullptr, 0, &left, nullptr, flags), comm);
                expect_place(left, rank, 3);
                EXPECT_EQ(sum_of(rank, left), 3);
                MOECCL_EXPECT_OK(moecclCommDestroy(left));
                MOECCL_EXPECT_OK(moecclCommDestroy(comm));
              },
              {.mode = GetParam(), .destroy = false});
  }
}

// Ranks 0 and 1 exchange messages only with each other, and rank 3 waits for rank 0, which never sends. All of them
// must hear of the revoke.
void revoke_reaches_all(TestHosts* hosts) {
  const Shared<std::atomic<int64_t>> revoked_ms;
  RankOptions options{.mode = RankMode::kProcesses, .destroy = false};
  options.hosts = hosts;
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        moecclResult_t result = moecclSuccess;
        int32_t word = rank;
        if (rank == 2) {
          usleep(30'000);
          *revoked_ms = fair_now_ms();
          MOECCL_EXPECT_OK(moecclCommRevoke(comm));
          EXPECT_EQ(moecclRecv(&word, 1, moecclInt32, 0, comm, nullptr), moecclAborted);
        } else if (rank == 3) {
          result = moecclRecv(&word, 1, moecclInt32, 0, comm, nullptr);
          EXPECT_EQ(result, moecclAborted) << moecclGetLastError(comm);
        } else {
          const Stopwatch watch;
          while (result == moecclSuccess && watch.fair_ms() < patient_ms(10'000)) {
            result = rank == 0 ? moecclSend(&word, 1, moecclInt32, 1, comm, nullptr)
                               : moecclRecv(&word, 1, moecclInt32, 0, comm, nullptr);
          }
          EXPECT_EQ(result, moecclAborted) << moecclGetLastError(comm);
        }
        EXPECT_LE(fair_now_ms() - *revoked_ms, patient_ms(1000));
        EXPECT_TRUE(says(comm, "rank 2 revoked the communicator")) << moecclGetLastError(comm);
        moecclResult_t state = moecclSuccess;
        MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &state));
        EXPECT_EQ(state, moecclAborted);
        int32_t sum = 0;
        EXPECT_EQ(moecclAllReduce(&word, &sum, 1, moecclInt32, moecclSum, comm, nullptr), moecclAborted);
        moecclComm_t left = nullptr;
        MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, nullptr, 0, &left, nullptr, MOECCL_SHRINK_DEFAULT), comm);
        EXPECT_EQ(sum_of(1, left), 4);
        MOECCL_EXPECT_OK(moecclCommDestroy(left));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

// Rank 3 fails, on its own, and then revokes: ranks 0 and 1, which go on without it, and rank 2 must hear of that too.
// No other rank of its host could pass the word on.
void revoke_after_a_failure_reaches_all(TestHosts* hosts) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = hosts;
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        int32_t words[2] = {rank, rank};
        if (rank == 3) {
          usleep(30'000);
          MOECCL_EXPECT_OK(moecclGroupStart());
          MOECCL_EXPECT_OK(moecclSend(words, 1, moecclInt32, 3, comm, nullptr));
          MOECCL_EXPECT_OK(moecclRecv(words, 2, moecclInt32, 3, comm, nullptr));
          EXPECT_EQ(moecclGroupEnd(), moecclMismatch);
          MOECCL_EXPECT_OK(moecclCommRevoke(comm));
          return;
        }
        moecclResult_t result = moecclSuccess;
        const Stopwatch watch;
        while (result == moecclSuccess && watch.fair_ms() < patient_ms(3'000)) {
          if (rank == 0) result = moecclSend(words, 1, moecclInt32, 1, comm, nullptr);
          if (rank == 1) result = moecclRecv(words, 1, moecclInt32, 0, comm, nullptr);
          if (rank == 2) {
            MOECCL_EXPECT_OK(moecclCommGetAsyncError(comm, &result));
          }
        }
        EXPECT_EQ(result, moecclAborted) << moecclGetLastError(comm);
        EXPECT_TRUE(says(comm, "rank 3 revoked the communicator")) << moecclGetLastError(comm);
      },
      options);
}

TEST(Revoke, AfterAFailureReachesAllOnOneHost) { revoke_after_a_failure_reaches_all(nullptr); }
TEST(Revoke, AfterAFailureReachesAllBetweenHosts) {
  MAKE_HOSTS(hosts, .weights = {3, 1}, .named = true);
  revoke_after_a_failure_reaches_all(hosts.get());
}

TEST(Revoke, ReachesRanksThatDoNotTalkToTheOneThatRevokesOnOneHost) { revoke_reaches_all(nullptr); }
TEST(Revoke, ReachesRanksThatDoNotTalkToTheOneThatRevokesBetweenHosts) {
  MAKE_HOSTS(hosts, .weights = {2, 2}, .named = true);
  revoke_reaches_all(hosts.get());
}

// Two new ranks join two old ones, and then two more.
void grow_twice(TestHosts* hosts, RankMode mode) {
  const Shared<SharedId> ids[2];
  RankOptions options{.mode = mode, .init = false};
  options.hosts = hosts;
  run_ranks(
      6,
      [&](int rank, moecclComm_t) {
        const moecclConfig_t config = timeouts(20'000);
        moecclComm_t comm = nullptr;
        if (rank < 2) {
          MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 2, unique_id(), rank, &config));
        }
        for (int step = 0; step < 2; ++step) {
          SharedId& shared = *ids[step];
          const int old = 2 + 2 * step, n = old + 2;
          if (rank >= n) continue;
          moecclComm_t more = nullptr;
          if (rank == 1) {  // any old rank may make the id
            MOECCL_ASSERT_OK(moecclCommGetUniqueId(comm, &shared.id));
            shared.made = 1;
          }
          if (rank >= old) shared.wait();
          const bool knows = rank >= old || rank == 1;
          MOECCL_ASSERT_OK(moecclCommGrow(comm, n, knows ? &shared.id : nullptr, rank < old ? -1 : rank, &more,
                                          rank < old ? nullptr : &config));
          expect_place(more, rank, n);
          EXPECT_EQ(sum_of(rank, more), n * (n - 1) / 2);
          if (comm != nullptr) {
            EXPECT_EQ(sum_of(1, comm), old) << "the old one works as before";
            MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          }
          comm = more;
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

TEST_P(Elastic, NewRanksComeBehindTheOldOnes) { grow_twice(nullptr, GetParam()); }
TEST(Grow, BetweenHosts) {
  MAKE_HOSTS(hosts, .weights = {2, 1}, .named = true);
  grow_twice(hosts.get(), RankMode::kProcesses);
}

// MOECCL_TOPOLOGY is for communicators that come from no other; a child of this test reads it after the fork.
TEST(Grow, WithATopologyInTheEnvironment) {
  ASSERT_EQ(setenv("MOECCL_TOPOLOGY", "auto", 1), 0);
  grow_twice(nullptr, RankMode::kProcesses);
  ASSERT_EQ(setenv("MOECCL_TOPOLOGY", "gpu:4", 1), 0);
  run_ranks(4,
            [](int rank, moecclComm_t comm) {
              moecclConfig_t named = timeouts(20'000);
              named.name = "half";
              moecclComm_t half = nullptr;
              MOECCL_ASSERT_OK(moecclCommSplit(comm, rank / 2, 0, &half, &named));
              EXPECT_EQ(sum_of(1, half), 2);
              MOECCL_EXPECT_OK(moecclCommDestroy(half));
            },
            {.mode = RankMode::kProcesses});
  ASSERT_EQ(unsetenv("MOECCL_TOPOLOGY"), 0);
}

// Three processes on two hosts by name meet over a UNIX socket, so one host has a single process.
TEST(NamedHosts, OfUnequalSizesMeetWithoutAnAddress) {
  RankOptions options{.mode = RankMode::kProcesses, .init = false};
  ASSERT_EQ(setenv("MOECCL_SOCKET_IFNAME", "lo", 1), 0);
  run_ranks(
      3,
      [](int rank, moecclComm_t) {
        ASSERT_EQ(setenv("MOECCL_HOST_ID", rank < 2 ? "first" : "second", 1), 0);
        const moecclConfig_t config = timeouts(20'000);
        moecclComm_t comm = nullptr;
        MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 3, unique_id(), rank, &config));
        EXPECT_EQ(sum_of(rank, comm), 3);
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
  ASSERT_EQ(unsetenv("MOECCL_SOCKET_IFNAME"), 0);
}

TEST(Grow, WhatCannotGrowSaysWhatIsMissing) {
  const Shared<SharedId> shared, other;
  Meeting left;
  run_ranks(2,
            [&](int rank, moecclComm_t comm) {
              moecclComm_t more = nullptr;
              const moecclConfig_t config = timeouts(800);
              moecclUniqueId* const mine = rank == 0 ? &shared->id : nullptr;
              // Each rank alone refuses these.
              EXPECT_EQ(moecclCommGrow(comm, 2, mine, -1, &more, &config), moecclInvalidArgument);
              EXPECT_TRUE(says(comm, "n_ranks is 2: give more than comm's 2")) << moecclGetLastError(comm);
              EXPECT_EQ(moecclCommGrow(comm, 3, mine, rank, &more, &config), moecclInvalidArgument);
              EXPECT_TRUE(says(comm, "give -1")) << moecclGetLastError(comm);
              EXPECT_EQ(moecclCommGrow(nullptr, 3, nullptr, 2, &more, &config), moecclInvalidArgument);
              EXPECT_TRUE(says(nullptr, "id is NULL")) << moecclGetLastError(nullptr);
              EXPECT_EQ(moecclCommGrow(nullptr, 3, &shared->id, 0, &more, &config), moecclInvalidArgument);
              EXPECT_EQ(moecclCommGrow(comm, 3, mine, -1, nullptr, &config), moecclInvalidArgument);
              // All ranks together refuse these.
              EXPECT_EQ(moecclCommGrow(comm, 3, nullptr, -1, &more, &config), moecclInvalidArgument);
              EXPECT_TRUE(says(comm, "id is NULL on all ranks of comm")) << moecclGetLastError(comm);
              moecclUniqueId own;
              MOECCL_ASSERT_OK(moecclCommGetUniqueId(comm, &own));
              EXPECT_EQ(moecclCommGrow(comm, 3, &own, -1, &more, &config), moecclInvalidArgument);
              EXPECT_TRUE(says(comm, "ranks 0 and 1 of comm give different ids")) << moecclGetLastError(comm);
              moecclUniqueId rubbish = {};
              EXPECT_EQ(moecclCommGrow(comm, 3, rank == 0 ? &rubbish : nullptr, -1, &more, &config),
                        moecclInvalidArgument);
              EXPECT_TRUE(says(comm, "the unique id was never made")) << moecclGetLastError(comm);
              // A new rank never comes.
              if (rank == 0) {
                MOECCL_ASSERT_OK(moecclCommGetUniqueId(comm, &shared->id));
              }
              const Stopwatch watch;
              EXPECT_EQ(moecclCommGrow(comm, 4, mine, -1, &more, &config), moecclTimeout);
              EXPECT_TRUE(says(comm, "ranks 2-3 of 4 did not join")) << moecclGetLastError(comm);
              EXPECT_LE(watch.fair_ms(), patient_ms(2000));
              EXPECT_EQ(sum_of(1, comm), 2) << "comm works as before";
              // A new rank comes with the id of another communicator. Each side names the ranks that it missed.
              if (rank == 0) {
                MOECCL_ASSERT_OK(moecclCommGetUniqueId(comm, &shared->id));
                MOECCL_ASSERT_OK(moecclGetUniqueId(&other->id));
              }
              std::thread stranger;
              if (rank == 0) {
                stranger = std::thread([&] {
                  moecclComm_t never = nullptr;
                  EXPECT_EQ(moecclCommGrow(nullptr, 3, &other->id, 2, &never, &config), moecclTimeout);
                  EXPECT_TRUE(says(nullptr, "ranks 0-1 of 3 did not join")) << moecclGetLastError(nullptr);
                });
              }
              EXPECT_EQ(moecclCommGrow(comm, 3, mine, -1, &more, &config), moecclTimeout);
              EXPECT_TRUE(says(comm, "rank 2 of 3 did not join")) << moecclGetLastError(comm);
              EXPECT_EQ(more, nullptr);
              if (stranger.joinable()) stranger.join();
              EXPECT_TRUE(left.meet(2));  // the one that waits a little longer would find that the other has ended
            },
            {.mode = RankMode::kProcesses});
}

TEST(Shrink, RefusesWhatMakesNoSense) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclComm_t left = nullptr;
    const int own[] = {rank}, beyond[] = {2}, negative[] = {-1};
    EXPECT_EQ(moecclCommShrink(comm, own, 1, &left, nullptr, 0), moecclInvalidArgument);
    EXPECT_TRUE(says(comm, "the calling rank")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclCommShrink(comm, beyond, 1, &left, nullptr, 0), moecclInvalidArgument);
    EXPECT_TRUE(says(comm, "exclude_ranks[0] is 2: give ranks of comm, 0 to 1")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclCommShrink(comm, negative, 1, &left, nullptr, 0), moecclInvalidArgument);
    EXPECT_EQ(moecclCommShrink(comm, nullptr, 1, &left, nullptr, 0), moecclInvalidArgument);
    EXPECT_EQ(moecclCommShrink(comm, own, -1, &left, nullptr, 0), moecclInvalidArgument);
    EXPECT_EQ(moecclCommShrink(comm, nullptr, 0, &left, nullptr, 2), moecclInvalidArgument);
    EXPECT_TRUE(says(comm, "flags is 2")) << moecclGetLastError(comm);
    EXPECT_EQ(moecclCommShrink(comm, nullptr, 0, nullptr, nullptr, 0), moecclInvalidArgument);
    EXPECT_EQ(moecclCommShrink(nullptr, nullptr, 0, &left, nullptr, 0), moecclInvalidArgument);
    EXPECT_EQ(moecclCommRevoke(nullptr), moecclInvalidArgument);
    EXPECT_EQ(moecclCommGetUniqueId(comm, nullptr), moecclInvalidArgument);
    MOECCL_EXPECT_OK(moecclGroupStart());
    EXPECT_EQ(moecclCommShrink(comm, nullptr, 0, &left, nullptr, 0), moecclInvalidUsage);
    MOECCL_EXPECT_OK(moecclGroupCancel());
    EXPECT_EQ(sum_of(1, comm), 2);
  });
}

TEST_P(Elastic, DifferentListsAreAMismatch) {
  run_ranks(4,
            [](int rank, moecclComm_t comm) {
              if (rank == 3) return;
              moecclComm_t left = nullptr;
              const int one[] = {3}, two[] = {3, 1};
              const moecclConfig_t config = timeouts(3000);
              const moecclResult_t result = moecclCommShrink(comm, rank == 2 ? two : one, rank == 2 ? 2 : 1, &left,
                                                             &config, MOECCL_SHRINK_DEFAULT);
              EXPECT_EQ(result, moecclMismatch) << moecclGetLastError(comm);
              EXPECT_TRUE(says(comm, "leave different ranks out") && says(comm, "2")) << moecclGetLastError(comm);
            },
            {.mode = GetParam()});
}

// The rank is alive, so no rank may go on without it unless the program names it.
TEST(Shrink, AStoppedRankIsNamedAndCanBeLeftOutByName) {
  for (const int stopped : {0, 2}) {
    const Shared<std::atomic<int>> is_stopped;
    Meeting end;
    RankOptions options{.mode = RankMode::kProcesses, .destroy = false};
    options.may_die = {stopped};
    options.on_running = [&](const std::vector<pid_t>& pids) {
      kill(pids[static_cast<size_t>(stopped)], SIGSTOP);
      *is_stopped = 1;
      EXPECT_TRUE(end.wait_for(3));
      kill(pids[static_cast<size_t>(stopped)], SIGKILL);
    };
    run_ranks(
        4,
        [&](int rank, moecclComm_t comm) {
          while (*is_stopped == 0) usleep(500);
          if (rank == stopped) pause();
          moecclComm_t left = nullptr;
          const moecclConfig_t config = timeouts(1000);
          const Stopwatch watch;
          const moecclResult_t result = moecclCommShrink(comm, nullptr, 0, &left, &config, MOECCL_SHRINK_DEFAULT);
          EXPECT_EQ(result, moecclTimeout) << moecclGetLastError(comm);
          EXPECT_TRUE(says(comm, "rank " + std::to_string(stopped))) << moecclGetLastError(comm);
          EXPECT_LE(watch.fair_ms(), patient_ms(2500));
          MOECCL_EXPECT_COMM_OK(moecclCommShrink(comm, &stopped, 1, &left, nullptr, MOECCL_SHRINK_DEFAULT), comm);
          EXPECT_EQ(sum_of(1, left), 3);
          EXPECT_TRUE(end.meet(3));
          MOECCL_EXPECT_OK(moecclCommDestroy(left));
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        },
        options);
  }
}

TEST(Shrink, WhoIsGoneBesideTheNamedIsNamed) {
  const Shared<std::atomic<int>> killed;
  RankOptions options{.mode = RankMode::kProcesses, .destroy = false};
  options.may_die = {1};
  options.on_running = [&](const std::vector<pid_t>& pids) {
    kill(pids[1], SIGKILL);
    *killed = 1;
  };
  run_ranks(
      4,
      [&](int rank, moecclComm_t comm) {
        if (rank == 1) pause();
        while (*killed == 0) usleep(500);
        if (rank == 2) return (void)moecclCommAbort(comm);
        moecclComm_t left = nullptr;
        const int named[] = {2}, both[] = {1, 2};
        EXPECT_EQ(moecclCommShrink(comm, named, 1, &left, nullptr, 0), moecclRemoteError);
        EXPECT_TRUE(says(comm, "rank 1 is gone too")) << moecclGetLastError(comm);
        MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, both, 2, &left, nullptr, 0), comm);
        EXPECT_EQ(sum_of(1, left), 2);
        MOECCL_EXPECT_OK(moecclCommDestroy(left));
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
