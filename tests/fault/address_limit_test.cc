// SPDX-License-Identifier: Apache-2.0
// Communicators under an address space limit (ulimit -v), as batch systems set it.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdlib>
#include <string>

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
    if (test_scale() < 1) GTEST_SKIP() << "sanitizers need addresses of their own";
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

}  // namespace
}  // namespace moeccl::testing
