// SPDX-License-Identifier: Apache-2.0
// What ends a wait early although its own peer is alive and well: a failure of another call of the group, a revocation
// by another thread, and ranks that the waiting thread drives itself.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <nlohmann/json.hpp>
#include <thread>

#include "moeccl/elastic.h"
#include "moeccl/status.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

void sleep_ms(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// Rank 0 waits in one group for rank 1, which computes, and for rank 2, which is killed.
void a_death_beside_a_busy_peer(int first, int second) {
  Shared<std::atomic<int>> over;
  RankOptions options{.mode = RankMode::kProcesses, .may_die = {2}};
  options.on_running = [](const std::vector<pid_t>& pids) {
    sleep_ms(200);
    kill(pids[2], SIGKILL);
  };
  run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        if (rank > 0) {
          while (over->load() == 0) sleep_ms(5);
          return;
        }
        int32_t values[2] = {};
        const Stopwatch watch;
        MOECCL_ASSERT_OK(moecclGroupStart());
        for (const int peer : {first, second})
          MOECCL_EXPECT_COMM_OK(moecclRecv(&values[peer - 1], 1, moecclInt32, peer, comm, nullptr), comm);
        EXPECT_EQ(moecclGroupEnd(), moecclRemoteError) << moecclGetLastError(comm);
        MOECCL_EXPECT_WITHIN(watch, 2000);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 2 died"), std::string::npos)
            << moecclGetLastError(comm);
        over->store(1);
      },
      options);
}
TEST(Waiting, EndsWhenTheLastPeerOfAGroupDies) { a_death_beside_a_busy_peer(1, 2); }
TEST(Waiting, EndsWhenTheFirstPeerOfAGroupDies) { a_death_beside_a_busy_peer(2, 1); }

TEST(Waiting, EndsAtOnceWhenAnotherThreadRevokesTheCommunicator) {
  for (const bool message : {true, false}) {
    Shared<std::atomic<int>> over;
    run_ranks(2,
              [&](int rank, moecclComm_t comm) {
                if (rank == 1) {
                  while (over->load() == 0) sleep_ms(5);
                  return;
                }
                Stopwatch watch;
                std::thread revoker([&] {
                  sleep_ms(100);
                  MOECCL_EXPECT_OK(moecclCommRevoke(comm));
                });
                int32_t value = 0;
                EXPECT_EQ(message ? moecclRecv(&value, 1, moecclInt32, 1, comm, nullptr)
                                  : moecclAllReduce(&value, &value, 1, moecclInt32, moecclSum, comm, nullptr),
                          moecclAborted);
                MOECCL_EXPECT_WITHIN(watch, 2000);
                revoker.join();
                over->store(1);
              },
              {.mode = RankMode::kProcesses});
  }
}

// The ranks that have not failed yet still use the others' buffers, until the same thread lets them go.
TEST(Waiting, OneThreadThatDrivesAllRanksDoesNotWaitForItself) {
  run_ranks(1,
            [](int, moecclComm_t) {
              constexpr int kRanks = 4;
              constexpr size_t kCount = 1 << 20;
              moecclComm_t comms[kRanks];
              MOECCL_ASSERT_OK(moecclCommInitAll(comms, kRanks, nullptr));
              std::vector<std::vector<float>> data(kRanks, std::vector<float>(kCount, 1.0f));
              const Stopwatch watch;
              MOECCL_ASSERT_OK(moecclGroupStart());
              for (int r = 0; r < kRanks; ++r)
                MOECCL_EXPECT_OK(moecclAllReduce(data[r].data(), data[r].data(), kCount - (r == 2 ? 1 : 0),
                                                 moecclFloat32, moecclSum, comms[r], nullptr));
              EXPECT_EQ(moecclGroupEnd(), moecclMismatch);
              MOECCL_EXPECT_WITHIN(watch, 900);
              for (moecclComm_t c : comms) MOECCL_EXPECT_OK(moecclCommDestroy(c));
            },
            {.init = false});
}

std::map<std::string, std::string> states() {
  std::string text(1 << 20, '\0');
  size_t needed = 0;
  EXPECT_EQ(moecclStatus(0, text.data(), text.size(), &needed), moecclSuccess) << moecclGetLastError(nullptr);
  const auto all = nlohmann::json::parse(text.c_str());
  std::map<std::string, std::string> found;
  for (const auto& operation : all["communicators"][0]["operations"]) found[operation["op"]] = operation["state"];
  return found;
}

// The collective of the group ends first. Its record is not the newest one.
TEST(Waiting, ForAMessageIsNotRecordedAsTheCollectiveOfItsGroup) {
  Shared<std::atomic<int>> seen;
  run_ranks(2,
            [&](int rank, moecclComm_t comm) {
              int32_t sum = 1, value = 7;
              moecclStream_t stream = nullptr;
              MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
              if (rank == 0) {
                MOECCL_ASSERT_OK(moecclGroupStart());
                MOECCL_EXPECT_COMM_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, stream), comm);
                MOECCL_EXPECT_COMM_OK(moecclRecv(&value, 1, moecclInt32, 1, comm, stream), comm);
                MOECCL_ASSERT_OK(moecclGroupEnd());
                for (const Stopwatch watch; states()["allreduce"] != "done" && watch.ms() < 5000;) sleep_ms(5);
                const auto now = states();
                EXPECT_EQ(now.at("allreduce"), "done");
                EXPECT_EQ(now.at("sendrecv"), "running");
                seen->store(1);
                MOECCL_EXPECT_COMM_OK(moecclStreamSynchronize(stream), comm);
                EXPECT_EQ(states()["sendrecv"], "done");
              } else {
                MOECCL_EXPECT_COMM_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, nullptr), comm);
                while (seen->load() == 0) sleep_ms(5);
                MOECCL_EXPECT_COMM_OK(moecclSend(&value, 1, moecclInt32, 0, comm, nullptr), comm);
              }
              EXPECT_EQ(sum, 2);
              MOECCL_EXPECT_OK(moecclStreamDestroy(stream));
            },
            {.mode = RankMode::kProcesses});
}

}  // namespace
}  // namespace moeccl::testing
