// SPDX-License-Identifier: Apache-2.0
// Ranks are lost while a group forms: at init between hosts, at a split, for lack of descriptors. The others hear of it
// at once, with the rank's number.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <atomic>
#include <cstdlib>
#include <random>
#include <thread>

#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr int kLimitMs = 1000;

struct Words {
  std::atomic<int64_t> gone_ms;
  std::atomic<int> joined;
};

std::unique_ptr<TestHosts> two_hosts() {
  std::string why_not;
  return TestHosts::create(HostsOptions{.weights = {2, 2}, .named = true}, &why_not);
}

bool names(const std::string& text, int rank) { return text.find("rank " + std::to_string(rank)) != std::string::npos; }

// Some victims die before they have identified themselves. They are reported as missing at the timeout.
TEST(Join, AKilledRankIsNamedAtOnceBetweenHosts) {
  constexpr int kRanks = 4, kInitMs = 1500;
  const auto hosts = two_hosts();
  for (int i = 0; i < scaled(8) && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 1000 + static_cast<uint64_t>(i));
    const int victim = static_cast<int>(random() % kRanks), delay_us = 2000 + static_cast<int>(random() % 20'000);
    SCOPED_TRACE(::testing::Message() << "kill " << i << ": rank " << victim << " after " << delay_us << " us");
    const Shared<Words> words;
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000, .init = false, .may_die = {victim}};
    options.hosts = hosts.get();
    options.on_running = [&](const std::vector<pid_t>& pid_of_rank) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      words->gone_ms = fair_now_ms();
      kill(pid_of_rank[static_cast<size_t>(victim)], SIGKILL);
    };
    run_ranks(
        kRanks,
        [&](int rank, moecclComm_t) {
          moecclConfig_t config = MOECCL_CONFIG_INIT;
          config.init_timeout_ms = kInitMs;
          moecclComm_t comm = nullptr;
          moecclResult_t result = moecclCommInitRankConfig(&comm, kRanks, unique_id(), rank, &config);
          const std::string text = moecclGetLastError(nullptr);
          if (result == moecclSuccess) {
            MOECCL_EXPECT_OK(moecclCommAbort(comm));
            return;
          }
          // The id came from rank 0, and no rank has reached rank 0's meeting point yet.
          const bool unmet = victim == 0 && text.find("the meeting point has ended") != std::string::npos;
          EXPECT_TRUE(names(text, victim) || unmet) << text;
          if (result == moecclTimeout) return;
          EXPECT_EQ(result, moecclRemoteError) << text;
          EXPECT_LE(fair_now_ms() - words->gone_ms, patient_ms(kLimitMs)) << text;
        },
        options);
  }
}

// The victim has agreed to the split but never comes to its part.
void lose_one_in_a_split(TestHosts* hosts) {
  constexpr int kRanks = 4, kVictim = 2;
  for (int i = 0; i < scaled(10) && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 100 + static_cast<uint64_t>(i));
    const int delay_us = 20'000 + static_cast<int>(random() % 10'000);
    const Shared<Words> words;
    Meeting ends;  // a rank that leaves would be the reported reason for ranks that check later
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000, .may_die = {kVictim}};
    options.hosts = hosts;
    options.on_running = [&](const std::vector<pid_t>& pid_of_rank) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      words->gone_ms = fair_now_ms();
      kill(pid_of_rank[kVictim], SIGKILL);
    };
    run_ranks(
        kRanks,
        [&](int rank, moecclComm_t comm) {
          moecclResult_t result = moecclSuccess;
          std::string text;
          const Stopwatch watch;
          while (result == moecclSuccess && watch.fair_ms() < patient_ms(10'000)) {
            moecclComm_t part = nullptr;
            result = moecclCommSplit(comm, rank % 2, -rank, &part, nullptr);
            text = moecclGetLastError(comm);
            if (result != moecclSuccess) break;
            int32_t one = 1, sum = 0;
            result = moecclAllReduce(&one, &sum, 1, moecclInt32, moecclSum, part, nullptr);
            text = moecclGetLastError(part);
            // Numbers are those of the part: the victim is its rank 0, and rank 0 is its rank 1.
            if (result != moecclSuccess) {
              EXPECT_TRUE(rank % 2 == 0 && names(text, 0)) << text;
            } else {
              EXPECT_EQ(sum, 2);
            }
            MOECCL_EXPECT_OK(result == moecclSuccess ? moecclCommDestroy(part) : moecclCommAbort(part));
            if (result != moecclSuccess) text = "rank 2";
          }
          EXPECT_LE(fair_now_ms() - words->gone_ms, patient_ms(kLimitMs)) << text;
          EXPECT_EQ(result, moecclRemoteError) << text;
          EXPECT_TRUE(names(text, kVictim)) << text;
          EXPECT_TRUE(ends.meet(kRanks - 1));
        },
        options);
  }
}

TEST(Join, ARankThatDiesInASplitIsNamedByItsNumberInTheParent) { lose_one_in_a_split(nullptr); }

TEST(Join, ARankThatDiesInASplitBetweenHostsIsNamed) { lose_one_in_a_split(two_hosts().get()); }

// Splits the communicator again and again. Returns the first failure and its text, or success after a while.
std::pair<moecclResult_t, std::string> split_until_it_fails(moecclComm_t comm) {
  moecclResult_t result = moecclSuccess;
  std::string text;
  for (const Stopwatch watch; result == moecclSuccess && watch.fair_ms() < patient_ms(10'000);) {
    moecclComm_t part = nullptr;
    result = moecclCommSplit(comm, 0, 0, &part, nullptr);
    text = moecclGetLastError(comm);
    MOECCL_EXPECT_OK(moecclCommDestroy(part));
  }
  return {result, text};
}

// Rank 1 leaves the parent as soon as its split has failed, while the others may not have heard of the victim yet.
TEST(Join, ARankThatLeavesAfterAFailedSplitIsNotNamed) {
  constexpr int kRanks = 4, kVictim = 3;
  const auto hosts = two_hosts();
  for (int i = 0; i < scaled(48) && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 100 + static_cast<uint64_t>(i));
    const int delay_us = 20'000 + static_cast<int>(random() % 10'000);
    RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 40'000, .destroy = false, .may_die = {kVictim}};
    options.hosts = i % 2 == 0 ? nullptr : hosts.get();
    options.on_running = [&](const std::vector<pid_t>& pid_of_rank) {
      std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
      kill(pid_of_rank[kVictim], SIGKILL);
    };
    Meeting ends;
    run_ranks(
        kRanks,
        [&](int rank, moecclComm_t comm) {
          const auto [result, text] = split_until_it_fails(comm);
          EXPECT_TRUE(rank == 1 || ends.wait_for(1));
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
          ends.arrive();
          EXPECT_EQ(result, moecclRemoteError) << text;
          EXPECT_TRUE(names(text, kVictim)) << "kill " << i << " on rank " << rank << ": " << text;
        },
        options);
  }
}

// A rank that has all that it needs hears of it only by the end of another one's split.
TEST(Join, ARevocationDuringASplitIsNoFailureOfARank) {
  constexpr int kRanks = 4, kRevokes = 1;
  for (int i = 0; i < scaled(20) && !::testing::Test::HasFailure(); ++i) {
    std::mt19937_64 random(test_seed() * 100 + static_cast<uint64_t>(i));
    const int delay_us = static_cast<int>(random() % 30'000);
    run_ranks(kRanks,
              [&](int rank, moecclComm_t comm) {
                std::thread revokes;
                if (rank == kRevokes) {
                  revokes = std::thread([&] {
                    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
                    MOECCL_EXPECT_OK(moecclCommRevoke(comm));
                  });
                }
                const auto [result, text] = split_until_it_fails(comm);
                EXPECT_EQ(result, moecclAborted) << "revocation " << i << " on rank " << rank << ": " << text;
                if (revokes.joinable()) revokes.join();
              },
              {.mode = RankMode::kProcesses, .deadline_ms = 40'000});
  }
}

// The first rank of a part cannot create the part's meeting point.
TEST(Join, APartWithoutAMeetingPointFailsAtOnceAndTheOtherDoesNot) {
  run_ranks(4,
            [](int rank, moecclComm_t) {
              const bool set = rank != 1 || setenv("MOECCL_SOCKET_ADDR", "192.0.2.1", 1) == 0;  // an address of no host
              ASSERT_TRUE(set);
              moecclComm_t comm = nullptr, part = nullptr;
              MOECCL_ASSERT_OK(moecclCommInitRank(&comm, 4, unique_id(), rank));
              const Stopwatch watch;
              const moecclResult_t result = moecclCommSplit(comm, rank % 2, rank, &part, nullptr);
              const std::string text = moecclGetLastError(comm);
              MOECCL_EXPECT_WITHIN(watch, 2 * kLimitMs);
              if (rank % 2 == 0) {
                EXPECT_EQ(result, moecclSuccess) << text;
                MOECCL_EXPECT_OK(moecclCommDestroy(part));
              } else {
                EXPECT_EQ(result, rank == 1 ? moecclInvalidArgument : moecclRemoteError) << text;
                EXPECT_TRUE(names(text, 1) && text.find("192.0.2.1") != std::string::npos) << text;
              }
              MOECCL_EXPECT_OK(moecclCommDestroy(comm));
            },
            {.mode = RankMode::kProcesses, .init = false});
}

// The group's calls on other communicators run all the same, because peers wait for them.
TEST(Join, OneThatFailsInAGroupTakesNoOtherCallAlong) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    int32_t sum = 0;
    const int32_t mine = rank + 1;
    moecclComm_t never = nullptr;
    if (rank == 0) {
      moecclUniqueId id;
      MOECCL_ASSERT_OK(moecclGetUniqueId(&id));
      moecclConfig_t config = MOECCL_CONFIG_INIT;
      config.init_timeout_ms = 300;
      MOECCL_ASSERT_OK(moecclGroupStart());
      MOECCL_EXPECT_OK(moecclCommInitRankConfig(&never, 2, id, 0, &config));  // the other rank of it never joins
      MOECCL_EXPECT_OK(moecclAllReduce(&mine, &sum, 1, moecclInt32, moecclSum, comm, nullptr));
      EXPECT_EQ(moecclGroupEnd(), moecclTimeout);
    } else {
      MOECCL_EXPECT_OK(moecclAllReduce(&mine, &sum, 1, moecclInt32, moecclSum, comm, nullptr));
    }
    EXPECT_EQ(sum, 3);
  });
}

// The port of MOECCL_SOCKET_ADDR is for the communicator whose id is made there; two parts cannot both meet at it.
TEST(Join, PartsMeetAtPortsOfTheirOwn) {
  const std::string address = "127.0.0.1:" + std::to_string(free_port());
  run_ranks(5,
            [&](int rank, moecclComm_t) {
              ASSERT_EQ(setenv("MOECCL_SOCKET_ADDR", address.c_str(), 1), 0);
              moecclComm_t comm = nullptr, part = nullptr;
              MOECCL_ASSERT_OK(moecclCommInitRank(&comm, 5, unique_id(), rank));
              // Rank 0's process made the id and read its variables before this one was set.
              const int color = rank == 0 ? 2 : rank % 2;
              MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, color, rank, &part, nullptr), comm);
              MOECCL_EXPECT_OK(moecclCommDestroy(part));
              MOECCL_EXPECT_OK(moecclCommDestroy(comm));
            },
            {.mode = RankMode::kProcesses, .init = false});
}

TEST(Join, TooFewDescriptorsAreNamedAtOnce) {
#if defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "the undefined-behaviour sanitizer needs descriptors for its own checks";
#endif
  for (const rlim_t files : {8u, 16u}) {
    run_ranks(1,
              [&](int, moecclComm_t) {
                const rlimit few = {files, files};
                ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
                moecclComm_t comms[8] = {};
                const Stopwatch watch;
                const moecclResult_t result = moecclCommInitAll(comms, 8, nullptr);
                const std::string text = moecclGetLastError(nullptr);
                MOECCL_EXPECT_WITHIN(watch, 8000);  // of 60 s
                EXPECT_TRUE(result == moecclSystemError || result == moecclRemoteError) << text;
                EXPECT_NE(text.find("ulimit -n"), std::string::npos) << text;
              },
              {.mode = RankMode::kProcesses, .init = false, .check_leaks = false});
  }
}

// Without a check, the kernel would end the process with a signal.
TEST(Join, ALimitOnFilesIsNamed) {
  run_ranks(1,
            [](int, moecclComm_t) {
              const rlimit few = {0, 0};
              ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
              moecclComm_t comms[2] = {};
              EXPECT_EQ(moecclCommInitAll(comms, 2, nullptr), moecclSystemError);
              const std::string text = moecclGetLastError(nullptr);
              EXPECT_NE(text.find("ulimit -f"), std::string::npos) << text;
            },
            {.mode = RankMode::kProcesses, .init = false, .check_leaks = false});
}

}  // namespace
}  // namespace moeccl::testing
