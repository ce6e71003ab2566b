// SPDX-License-Identifier: Apache-2.0
// The life of communicators: all ways of init, split, finalize, memory, streams and plans.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <iterator>
#include <numeric>
#include <thread>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

class ApiComm : public ::testing::TestWithParam<RankMode> {};

TEST_P(ApiComm, KnowsItsRankAndSize) {
  run_ranks(5,
            [](int rank, moecclComm_t comm) {
              int r = -1, n = -1;
              MOECCL_EXPECT_COMM_OK(moecclCommUserRank(comm, &r), comm);
              MOECCL_EXPECT_COMM_OK(moecclCommCount(comm, &n), comm);
              EXPECT_EQ(r, rank);
              EXPECT_EQ(n, 5);
              moecclResult_t state = moecclInternalError;
              MOECCL_EXPECT_COMM_OK(moecclCommGetAsyncError(comm, &state), comm);
              EXPECT_EQ(state, moecclSuccess);
              EXPECT_STREQ(moecclGetLastError(comm), "");
            },
            {.mode = GetParam()});
}

// Sums the ranks' numbers over `comm`, whose members must be the given ranks in this order.
void expect_members(moecclComm_t comm, int mine, const std::vector<int>& members) {
  int n = 0;
  MOECCL_ASSERT_COMM_OK(moecclCommCount(comm, &n), comm);
  ASSERT_EQ(n, static_cast<int>(members.size()));
  std::vector<int32_t> all(members.size());
  const int32_t me = mine;
  MOECCL_ASSERT_COMM_OK(moecclAllGather(&me, all.data(), 1, moecclInt32, comm, nullptr), comm);
  EXPECT_TRUE(std::equal(all.begin(), all.end(), members.begin()));
}

TEST_P(ApiComm, SplitsByColorInOrderOfKey) {
  run_ranks(7,
            [](int rank, moecclComm_t comm) {
              // Uneven colors: {0, 3, 6} and {1, 4}; 2 and 5 stay out. Keys reverse the order.
              moecclComm_t part = nullptr;
              const int color = rank % 3 == 2 ? -1 : rank % 3;
              MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, color, -rank, &part, nullptr), comm);
              if (color < 0) {
                EXPECT_EQ(part, nullptr);
              } else {
                expect_members(part, rank, color == 0 ? std::vector<int>{6, 3, 0} : std::vector<int>{4, 1});
                EXPECT_EQ(moecclCommDestroy(part), moecclSuccess);
              }
              expect_members(comm, rank, {0, 1, 2, 3, 4, 5, 6});
            },
            {.mode = GetParam()});
}

TEST_P(ApiComm, SplitsOfSplitsWork) {
  run_ranks(8,
            [](int rank, moecclComm_t comm) {
              moecclComm_t half = nullptr, quarter = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, rank / 4, 0, &half, nullptr), comm);
              MOECCL_ASSERT_COMM_OK(moecclCommSplit(half, rank / 2 % 2, 0, &quarter, nullptr), half);
              EXPECT_EQ(moecclCommDestroy(half), moecclSuccess) << "the parent may go first";
              expect_members(quarter, rank, {rank / 2 * 2, rank / 2 * 2 + 1});
              EXPECT_EQ(moecclCommDestroy(quarter), moecclSuccess);
            },
            {.mode = GetParam()});
}

TEST_P(ApiComm, FinalizeWaitsAndDestroyNeedsNoPeers) {
  RankOptions options{.mode = GetParam(), .destroy = false};
  run_ranks(
      3,
      [](int rank, moecclComm_t comm) {
        moecclStream_t stream = nullptr;
        MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
        std::vector<float> data(100000, 1);
        MOECCL_ASSERT_COMM_OK(
            moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, stream), comm);
        MOECCL_EXPECT_COMM_OK(moecclCommFinalize(comm), comm);
        EXPECT_EQ(data.back(), 3.0f) << "finalize returned before the operation was done";
        // Ranks leave at different times, and none waits for the others.
        std::this_thread::sleep_for(std::chrono::milliseconds(rank * 100));
        const Stopwatch watch;
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        MOECCL_EXPECT_WITHIN(watch, 1000);
        EXPECT_EQ(moecclStreamDestroy(stream), moecclSuccess);
      },
      options);
}

// A rank may destroy as soon as its own call has returned, while slower ranks still read the data that it sent.
TEST_P(ApiComm, DestroyRightAfterACollectiveDoesNotHurtSlowerRanks) {
  for (int round = 0; round < scaled(10); ++round) {
    const bool ok =
        run_ranks(4,
                  [](int rank, moecclComm_t comm) {
                    std::vector<float> data(200000, static_cast<float>(rank));
                    MOECCL_EXPECT_COMM_OK(
                        moecclBroadcast(data.data(), data.data(), data.size(), moecclFloat32, 2, comm, nullptr), comm);
                    EXPECT_EQ(std::accumulate(data.begin(), data.end(), 0.0), 400000.0);
                  },
                  {.mode = GetParam()});
    if (!ok) return;
  }
}

TEST_P(ApiComm, ManyCommunicatorsBesideEachOther) {
  run_ranks(3,
            [](int rank, moecclComm_t comm) {
              std::vector<moecclComm_t> copies(5);
              for (moecclComm_t& c : copies) MOECCL_ASSERT_COMM_OK(moecclCommSplit(comm, 0, rank, &c, nullptr), comm);
              for (int i = 0; i < 20; ++i) {
                int32_t value = i;
                moecclComm_t c = copies[static_cast<size_t>(i) % copies.size()];
                MOECCL_ASSERT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclInt32, moecclSum, c, nullptr), c);
                EXPECT_EQ(value, 3 * i);
              }
              for (moecclComm_t c : copies) EXPECT_EQ(moecclCommDestroy(c), moecclSuccess);
            },
            {.mode = GetParam()});
}

TEST_P(ApiComm, MemoryUsageStaysBelowTheConfiguredStaging) {
  RankOptions options{.mode = GetParam()};
  options.config.staging_bytes = 1 << 20;
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        std::vector<float> data(1 << 20, 1);
        MOECCL_ASSERT_COMM_OK(
            moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, nullptr), comm);
        size_t bytes = 0;
        MOECCL_ASSERT_COMM_OK(moecclCommMemoryUsage(comm, &bytes), comm);
        EXPECT_GT(bytes, 0u);
        EXPECT_LT(bytes, size_t{4} << 20) << "staging of 1 MiB, message slots of at most 2 MiB, and control";
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Modes, ApiComm, ::testing::Values(RankMode::kThreads, RankMode::kProcesses, RankMode::kMixed),
                         [](const ::testing::TestParamInfo<RankMode>& info) { return mode_name(info.param); });

// Runs in a separate child, like every use of the library in a test.
void alone(const std::function<void()>& fn) {
  run_ranks(1, [&](int, moecclComm_t) { fn(); }, {.init = false});
}

TEST(ApiInitAll, OneThreadDrivesAllRanksInAGroup) {
  alone([] {
    moecclComm_t comms[4];
    MOECCL_ASSERT_OK(moecclCommInitAll(comms, 4, nullptr));
    float values[4] = {1, 2, 3, 4};
    moecclStream_t streams[4];
    for (moecclStream_t& s : streams) MOECCL_ASSERT_OK(moecclStreamCreate(&s));
    MOECCL_ASSERT_OK(moecclGroupStart());
    for (int r = 0; r < 4; ++r) {
      MOECCL_EXPECT_OK(moecclAllReduce(&values[r], &values[r], 1, moecclFloat32, moecclSum, comms[r], streams[r]));
    }
    MOECCL_ASSERT_OK(moecclGroupEnd());
    for (moecclStream_t s : streams) MOECCL_EXPECT_OK(moecclStreamSynchronize(s));
    for (float v : values) EXPECT_EQ(v, 10.0f);
    // Blocking calls of several ranks on one thread work in a group.
    MOECCL_ASSERT_OK(moecclGroupStart());
    for (int r = 0; r < 4; ++r) {
      MOECCL_EXPECT_OK(moecclAllReduce(&values[r], &values[r], 1, moecclFloat32, moecclMax, comms[r], nullptr));
    }
    MOECCL_EXPECT_OK(moecclGroupEnd());
    for (moecclStream_t s : streams) MOECCL_EXPECT_OK(moecclStreamDestroy(s));
    for (moecclComm_t c : comms) MOECCL_EXPECT_OK(moecclCommDestroy(c));
  });
}

// A meeting point has a thread, which would stay until the init timeout.
TEST(ApiInitAll, LeavesNoMeetingPointWithoutJoins) {
  run_ranks(1,
            [](int, moecclComm_t) {
              const auto n_threads = [] {
                const std::filesystem::directory_iterator tasks("/proc/self/task");
                return std::distance(begin(tasks), end(tasks));
              };
              const auto before = n_threads();
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.staging_bytes = 5;
              moecclComm_t unset = nullptr;
              std::memset(&unset, 0x5a, sizeof(unset));
              moecclComm_t comms[3] = {unset, unset, unset};
              EXPECT_EQ(moecclCommInitAll(comms, 0, nullptr), moecclInvalidArgument);
              EXPECT_EQ(moecclCommInitAll(comms, 3, &config), moecclInvalidArgument);
              for (moecclComm_t comm : comms) EXPECT_EQ(comm, nullptr);
              MOECCL_ASSERT_OK(moecclGroupStart());
              MOECCL_EXPECT_OK(moecclCommInitAll(comms, 3, nullptr));
              MOECCL_ASSERT_OK(moecclGroupCancel());
              EXPECT_EQ(n_threads(), before);
            },
            {.init = false});
}

TEST(ApiInitAll, Makes256RanksInTwoSeconds) {
  alone([] {
    std::vector<moecclComm_t> comms(256);
    const Stopwatch watch;
    MOECCL_ASSERT_OK(moecclCommInitAll(comms.data(), 256, nullptr));
    MOECCL_EXPECT_WITHIN(watch, 2000);
    for (moecclComm_t c : comms) MOECCL_EXPECT_OK(moecclCommDestroy(c));
  });
}

TEST(ApiInitEnv, SaysThatThereIsNoLauncher) {
  alone([] {
    for (const char* name : {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
                             "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS"}) {
      unsetenv(name);
    }
    moecclComm_t comm = nullptr;
    EXPECT_EQ(moecclCommInitEnv(&comm, nullptr), moecclInvalidUsage);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)), "");
  });
}

TEST(ApiInitEnv, JoinsAsTheLauncherSays) {
  const int port = free_port();
  run_ranks(3,
            [port](int rank, moecclComm_t) {
              setenv("RANK", std::to_string(rank).c_str(), 1);
              setenv("WORLD_SIZE", "3", 1);
              setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
              setenv("MASTER_ADDR", "127.0.0.1", 1);
              setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
              moecclComm_t comm = nullptr;
              MOECCL_ASSERT_OK(moecclCommInitEnv(&comm, nullptr));
              int32_t value = rank;
              MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclInt32, moecclSum, comm, nullptr), comm);
              EXPECT_EQ(value, 3);
              MOECCL_EXPECT_OK(moecclCommDestroy(comm));
            },
            {.mode = RankMode::kProcesses, .init = false});
}

// Rank 0 comes when rank 1 has waited for nearly all of its time, and rank 2 never comes.
TEST(ApiInitEnv, FindingRankZeroAndJoiningShareTheTimeout) {
  const int port = free_port();
  run_ranks(2,
            [port](int rank, moecclComm_t) {
              setenv("RANK", std::to_string(rank).c_str(), 1);
              setenv("WORLD_SIZE", "3", 1);
              setenv("MASTER_ADDR", "127.0.0.1", 1);
              setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
              moecclConfig_t config = MOECCL_CONFIG_INIT;
              config.init_timeout_ms = static_cast<int32_t>(patient_ms(2000));
              const Stopwatch watch;
              if (rank == 0) usleep(static_cast<useconds_t>(patient_ms(1900) * 1000));
              moecclComm_t comm = nullptr;
              EXPECT_EQ(moecclCommInitEnv(&comm, &config), moecclTimeout);
              EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("rank 2"), std::string::npos)
                  << moecclGetLastError(nullptr);
              MOECCL_EXPECT_WITHIN(watch, 2600);
            },
            {.mode = RankMode::kProcesses, .init = false});
}

TEST(ApiPlan, ForcedPlansRunAndAreExplained) {
  RankOptions options;
  options.config.topology = "node:2 gpu:2";
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        EXPECT_EQ(moecclPlanForce(comm, moecclOpAllReduce, "no-such"), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("ring"), std::string::npos) << moecclGetLastError(comm);
        EXPECT_EQ(moecclPlanForce(comm, static_cast<moecclOp_t>(MOECCL_NUM_OPS), "ring"), moecclInvalidArgument);
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "ring"), comm);
        std::vector<float> data(10000, 1);
        MOECCL_ASSERT_COMM_OK(
            moecclAllReduce(data.data(), data.data(), data.size(), moecclFloat32, moecclSum, comm, nullptr), comm);
        moecclPlanInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpAllReduce, data.size(), moecclFloat32, &info), comm);
        EXPECT_STREQ(info.algorithm, "ring");
        EXPECT_GT(info.wire_bytes, data.size() * 4);
        EXPECT_GT(info.predicted_us, 0);
        EXPECT_GT(info.measured_us, 0) << "it has run";
        EXPECT_GT(info.n_steps, 0u);
        EXPECT_GE(info.n_chunks, 1u);
        EXPECT_EQ(info.emulated, 0);
        uint64_t hashes[4] = {};
        MOECCL_ASSERT_COMM_OK(moecclAllGather(&info.hash, hashes, 1, moecclUint64, comm, nullptr), comm);
        for (uint64_t h : hashes) EXPECT_EQ(h, info.hash);
        MOECCL_ASSERT_COMM_OK(moecclPlanForce(comm, moecclOpAllReduce, "auto"), comm);
      },
      options);
}

TEST(ApiPlan, ExplainIsCutToTheBufferAndSaysItsLength) {
  run_ranks(2, [](int, moecclComm_t comm) {
    size_t needed = 0;
    MOECCL_ASSERT_COMM_OK(moecclPlanExplain(comm, moecclOpAllGather, 1000, moecclFloat32, nullptr, 0, &needed), comm);
    ASSERT_GT(needed, 100u);
    std::vector<char> all(needed, 'x');
    MOECCL_ASSERT_COMM_OK(moecclPlanExplain(comm, moecclOpAllGather, 1000, moecclFloat32, all.data(), needed, nullptr),
                          comm);
    EXPECT_EQ(strlen(all.data()) + 1, needed);
    EXPECT_NE(std::string(all.data()).find("AllGather"), std::string::npos) << all.data();
    char some[32];
    memset(some, 'x', sizeof(some));
    MOECCL_ASSERT_COMM_OK(moecclPlanExplain(comm, moecclOpAllGather, 1000, moecclFloat32, some, sizeof(some), &needed),
                          comm);
    EXPECT_EQ(strlen(some), sizeof(some) - 1);
    EXPECT_EQ(strncmp(some, all.data(), sizeof(some) - 1), 0);
    moecclPlanInfo_t info{};
    EXPECT_EQ(moecclPlanQuery(comm, moecclOpAllGather, 1, moecclFloat32, &info), moecclInvalidArgument) << "size is 0";
    EXPECT_EQ(moecclPlanQuery(comm, moecclOpAllGather, 1, moecclFloat32, nullptr), moecclInvalidArgument);
  });
}

TEST(ApiPlan, TheEnvironmentForcesPlansToo) {
  setenv("MOECCL_PLAN", "allreduce:ring", 1);  // the environment is read once, so set it before the ranks begin
  run_ranks(2, [](int, moecclComm_t comm) {
    moecclPlanInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpAllReduce, 100000, moecclFloat32, &info), comm);
    EXPECT_STREQ(info.algorithm, "ring");
  });
  unsetenv("MOECCL_PLAN");
}

TEST(ApiPlan, PacedLinksAreSaidToBeEmulated) {
  RankOptions options;
  options.config.topology = "node:2(bw=1GB/s,lat=20us) gpu:1";
  options.config.pace = 1;
  run_ranks(
      2,
      [](int, moecclComm_t comm) {
        constexpr size_t kCount = 5'000'000;  // 20 MB at 1 GB/s: at least 20 ms
        std::vector<float> data(kCount, 1);
        const Stopwatch watch;
        MOECCL_ASSERT_COMM_OK(moecclBroadcast(data.data(), data.data(), kCount, moecclFloat32, 0, comm, nullptr), comm);
        EXPECT_GE(watch.ms(), 18);
        moecclPlanInfo_t info{};
        info.size = sizeof(info);
        MOECCL_ASSERT_COMM_OK(moecclPlanQuery(comm, moecclOpBroadcast, kCount, moecclFloat32, &info), comm);
        EXPECT_EQ(info.emulated, 1);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
