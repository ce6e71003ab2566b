// SPDX-License-Identifier: Apache-2.0
// Communicators under an address space limit (ulimit -v), as batch systems set it.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

size_t mapped_bytes() {
  unsigned long pages = 0;
  std::FILE* statm = std::fopen("/proc/self/statm", "re");
  if (statm == nullptr || std::fscanf(statm, "%lu", &pages) != 1) pages = 0;
  if (statm != nullptr) std::fclose(statm);
  return pages * 4096;
}

void limit_addresses(size_t bytes_more) {
  const rlimit limit{mapped_bytes() + bytes_more, RLIM_INFINITY};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

// Ranks join under the limit, and use the heap that they got.
void join_and_use(int n, int rank) {
  moecclConfig_t config = MOECCL_CONFIG_INIT;
  config.timeout_ms = config.init_timeout_ms = 20'000;
  config.staging_bytes = 1 << 20;
  moecclComm_t comm = nullptr;
  MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, n, unique_id(), rank, &config));
  constexpr size_t kCount = 1 << 18;
  float* x = nullptr;
  MOECCL_ASSERT_OK(moecclMemAlloc(reinterpret_cast<void**>(&x), kCount * sizeof(float)));
  for (size_t i = 0; i < kCount; ++i) x[i] = 1;
  MOECCL_ASSERT_COMM_OK(moecclAllReduce(x, x, kCount, moecclFloat32, moecclSum, comm, nullptr), comm);
  EXPECT_EQ(x[kCount - 1], static_cast<float>(n));
  void* large = nullptr;
  EXPECT_EQ(moecclMemAlloc(&large, size_t{1} << 40), moecclOutOfMemory);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("MOECCL_HEAP_BYTES"), std::string::npos)
      << moecclGetLastError(nullptr);
  MOECCL_EXPECT_OK(moecclCommDestroy(comm));
  MOECCL_EXPECT_OK(moecclMemFree(x));
}

class AddressLimit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (sanitized()) GTEST_SKIP() << "sanitizers need addresses of their own";
  }
  const RankOptions options_{.mode = RankMode::kProcesses, .init = false, .destroy = false};
};

TEST_F(AddressLimit, TheHeapTakesAsMuchAsFits) {
  for (const size_t limit : {size_t{4} << 30, size_t{1} << 30}) {
    run_ranks(
        4,
        [&](int rank, moecclComm_t) {
          limit_addresses(limit);
          join_and_use(4, rank);
        },
        options_);
  }
}

TEST_F(AddressLimit, TheVariableSaysHowMuch) {
  setenv("MOECCL_HEAP_BYTES", "32M", 1);
  run_ranks(
      2,
      [&](int rank, moecclComm_t) {
        limit_addresses(size_t{512} << 20);
        join_and_use(2, rank);
        void* large = nullptr;
        EXPECT_EQ(moecclMemAlloc(&large, size_t{33} << 20), moecclOutOfMemory);
      },
      options_);
  unsetenv("MOECCL_HEAP_BYTES");
}

TEST_F(AddressLimit, WhereNothingFitsTheErrorNamesTheRemedy) {
  setenv("MOECCL_HEAP_BYTES", "8G", 1);
  run_ranks(
      1,
      [&](int, moecclComm_t) {
        limit_addresses(size_t{1} << 30);
        moecclComm_t comm = nullptr;
        EXPECT_EQ(moecclCommInitAll(&comm, 1, nullptr), moecclOutOfMemory);
        const std::string text = moecclGetLastError(nullptr);
        EXPECT_NE(text.find("ulimit -v"), std::string::npos) << text;
        EXPECT_NE(text.find("MOECCL_HEAP_BYTES"), std::string::npos) << text;
      },
      options_);
  unsetenv("MOECCL_HEAP_BYTES");
}

// The staging that the library would like to have on this line, 4 x 384 MiB of addresses, does not fit.
TEST_F(AddressLimit, StagingOfALongLineGrowsAsFarAsItFits) {
  RankOptions options = options_;
  for (const RankMode mode : {RankMode::kThreads, RankMode::kProcesses}) {
    options.mode = mode;
    Meeting limited;
    run_ranks(
        4,
        [&](int rank, moecclComm_t) {
          if (mode == RankMode::kProcesses || rank == 0) limit_addresses(size_t{1200} << 20);
          ASSERT_TRUE(limited.meet(4));
          moecclConfig_t config = MOECCL_CONFIG_INIT;
          config.timeout_ms = config.init_timeout_ms = 20'000;
          config.topology = "dc:2(bw=1.25GB/s,lat=20ms) gpu:2";
          config.pace = 1;
          moecclComm_t comm = nullptr;
          MOECCL_ASSERT_OK(moecclCommInitRankConfig(&comm, 4, unique_id(), rank, &config));
          int32_t sum = rank;
          MOECCL_EXPECT_OK(moecclAllReduce(&sum, &sum, 1, moecclInt32, moecclSum, comm, nullptr));
          EXPECT_EQ(sum, 6);
          MOECCL_EXPECT_OK(moecclCommDestroy(comm));
        },
        options);
  }
}

TEST_F(AddressLimit, StagingThatDoesNotFitNamesItsVariable) {
  run_ranks(
      1,
      [&](int, moecclComm_t) {
        limit_addresses(size_t{1} << 30);
        moecclConfig_t config = MOECCL_CONFIG_INIT;
        config.staging_bytes = size_t{2} << 30;
        moecclComm_t comm = nullptr;
        EXPECT_EQ(moecclCommInitRankConfig(&comm, 1, unique_id(), 0, &config), moecclOutOfMemory);
        const std::string text = moecclGetLastError(nullptr);
        EXPECT_NE(text.find("set MOECCL_STAGING_BYTES, of which a rank has 2147483648 here, lower"), std::string::npos)
            << text;
        EXPECT_NE(text.find("ulimit -v"), std::string::npos) << text;
      },
      options_);
}

// All tokens choose rank 0's experts, so one of them changes places, but rank 0 has no room for what comes.
void swap_without_room(int rank, moecclComm_t comm, int at_finish) {
  constexpr size_t kTokens = 64, kSlotBytes = size_t{64} << 20, kSlots = 2;
  moecclMoeConfig_t layer = MOECCL_MOE_CONFIG_INIT;
  layer.hidden_bytes = 64;
  layer.type = moecclFloat32;
  layer.top_k = 1;
  layer.n_experts = 4;
  layer.max_tokens = kTokens;
  moecclExpertSwapConfig_t config = MOECCL_EXPERT_SWAP_CONFIG_INIT;
  config.interval = 1;
  config.min_gain = -1;
  config.horizon = 1e9;
  moecclMoe_t moe = nullptr;
  moecclExpertSwap_t swap = nullptr;
  moecclRouting_t routing = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &layer), comm);
  MOECCL_ASSERT_COMM_OK(moecclExpertSwapCreate(&swap, comm, &config), comm);
  void* const slots =
      mmap(nullptr, kSlots * kSlotBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(slots, MAP_FAILED);
  const moecclSwapTensor_t tensor{slots, kSlotBytes, at_finish, 0};
  MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe, &tensor, 1, nullptr, nullptr), comm);
  std::vector<int32_t> topk(kTokens);
  for (size_t i = 0; i < topk.size(); ++i) topk[i] = static_cast<int32_t>(i % 2);
  MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, topk.data(), nullptr, kTokens), comm);
  if (rank == 0) limit_addresses(size_t{16} << 20);
  MOECCL_ASSERT_COMM_OK(moecclExpertSwapBegin(swap), comm);
  EXPECT_EQ(moecclExpertSwapFinish(swap, nullptr), rank == 0 ? moecclOutOfMemory : moecclRemoteError)
      << moecclGetLastError(nullptr);
  const rlimit no_limit{RLIM_INFINITY, RLIM_INFINITY};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &no_limit), 0);
  // Rank 1 learns it before rank 0 destroys anything.
  MOECCL_EXPECT_OK(moecclAllReduce(topk.data(), topk.data(), 1, moecclInt32, moecclSum, comm, nullptr));
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
  MOECCL_EXPECT_OK(moecclExpertSwapDestroy(swap));
  MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
  munmap(slots, kSlots * kSlotBytes);
}

// Rank 0 has no room for its remainders, so no rank gets an object.
TEST_F(AddressLimit, AGradientReturnWithoutRoomFailsOnAllRanks) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              const int32_t domain = 2;
              moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
              config.n_experts = 2;
              config.domain = &domain;
              config.n_levels = 1;
              moecclHybrid_t hybrid = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
              moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
              back.count = size_t{16} << 20;
              moecclGradientReturn_t gradients = nullptr;
              if (rank == 0) limit_addresses(size_t{16} << 20);
              EXPECT_EQ(moecclGradientReturnCreate(&gradients, hybrid, nullptr, &back),
                        rank == 0 ? moecclOutOfMemory : moecclRemoteError)
                  << moecclGetLastError(nullptr);
              EXPECT_EQ(gradients, nullptr);
              const rlimit no_limit{RLIM_INFINITY, RLIM_INFINITY};
              ASSERT_EQ(setrlimit(RLIMIT_AS, &no_limit), 0);
              back.count = 100;  // the communicator goes on
              MOECCL_EXPECT_COMM_OK(moecclGradientReturnCreate(&gradients, hybrid, nullptr, &back), comm);
              MOECCL_EXPECT_OK(moecclGradientReturnDestroy(gradients));
              MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
            },
            {.mode = RankMode::kProcesses});
}

// A call of one rank alone that finds no memory only fails: no peer waits for it.
TEST_F(AddressLimit, AMigrationsSendWithoutRoomLeavesTheCommunicator) {
  run_ranks(2,
            [](int rank, moecclComm_t comm) {
              moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
              config.n_experts = 2;
              config.n_levels = 1;
              const int32_t domain[] = {2};
              config.domain = domain;
              moecclHybrid_t hybrid = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
              moecclMigrationConfig_t moved = MOECCL_MIGRATION_CONFIG_INIT;
              moved.count = size_t{1} << 34;
              moved.ratio = 1;
              moecclMigration_t migration = nullptr;
              MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&migration, hybrid, nullptr, &moved), comm);
              float value = 1;
              if (rank == 0) {
                limit_addresses(size_t{64} << 20);
                EXPECT_EQ(moecclMigrationSend(migration, 0, &value, nullptr, nullptr), moecclOutOfMemory);
                const rlimit no_limit{RLIM_INFINITY, RLIM_INFINITY};
                ASSERT_EQ(setrlimit(RLIMIT_AS, &no_limit), 0);
              }
              MOECCL_EXPECT_COMM_OK(moecclAllReduce(&value, &value, 1, moecclFloat32, moecclSum, comm, nullptr), comm);
              EXPECT_EQ(value, 2);
              MOECCL_EXPECT_OK(moecclMigrationDestroy(migration));
              MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
            },
            {.mode = RankMode::kProcesses});
}

TEST_F(AddressLimit, ASwapWithoutRoomFailsOnAllRanksAtOnce) {
  for (const int at_finish : {0, 1})
    run_ranks(2, [&](int rank, moecclComm_t comm) { swap_without_room(rank, comm, at_finish); },
              {.mode = RankMode::kProcesses});
}

}  // namespace
}  // namespace moeccl::testing
