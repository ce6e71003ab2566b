// SPDX-License-Identifier: Apache-2.0
// More than 2^31 elements: counts and offsets are 64 bits wide everywhere. Two process ranks have one buffer of 2 GiB
// each. Skipped where memory is short and under sanitizers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <memory>

#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

constexpr size_t kCount = (size_t{1} << 31) + 5;
constexpr size_t kHalf = (size_t{1} << 30) + 3;  // 2 x kHalf > 2^31 too

size_t available_bytes() {
  FILE* f = fopen("/proc/meminfo", "r");
  if (f == nullptr) return 0;
  char line[128];
  unsigned long kib = 0;
  while (fgets(line, sizeof(line), f) != nullptr && sscanf(line, "MemAvailable: %lu kB", &kib) != 1) {
  }
  fclose(f);
  return size_t{kib} << 10;
}

// Small, so that sums fit, and dependent on all bits of i, so that a row that is 2^31 or 2^32 elements off is noticed.
int8_t value(int rank, size_t i) {
  return static_cast<int8_t>(((i ^ (i >> 7) ^ (i >> 16) ^ (i >> 23) ^ (i >> 31)) & 31) +
                             11 * static_cast<size_t>(rank));
}

// Calls f(i) near the beginning, the end, the limits of 31 and 30 bits, and at regular steps between them.
template <class F>
void at_places(size_t count, F&& f) {
  constexpr size_t kWindow = 70'000, kStride = 1021;
  for (size_t i = 0; i < count; i += kStride) f(i);
  for (const size_t middle : {size_t{0}, size_t{1} << 30, size_t{1} << 31, kHalf, count}) {
    const size_t begin = middle > kWindow ? middle - kWindow : 0;
    for (size_t i = begin; i < std::min(count, middle + kWindow); ++i) f(i);
  }
}

template <class Expected>
void expect_values(const int8_t* data, size_t count, const char* what, Expected&& expected) {
  size_t n_wrong = 0, first = 0;
  at_places(count, [&](size_t i) {
    if (data[i] == static_cast<int8_t>(expected(i))) return;
    if (n_wrong++ == 0) first = i;
  });
  EXPECT_EQ(n_wrong, 0u) << what << ": element " << first << " is " << int{data[first]};
}

void fill(int8_t* data, size_t count, int rank) {
  for (size_t i = 0; i < count; ++i) data[i] = value(rank, i);
}

void run_all(int rank, moecclComm_t comm) {
  std::unique_ptr<int8_t[]> buffer(new int8_t[2 * kHalf]);
  int8_t* data = buffer.get();
  const auto mine = [&] { return data + static_cast<size_t>(rank) * kHalf; };

  fill(data, kCount, rank);
  MOECCL_ASSERT_COMM_OK(moecclAllReduce(data, data, kCount, moecclInt8, moecclSum, comm, nullptr), comm);
  expect_values(data, kCount, "allreduce", [](size_t i) { return value(0, i) + value(1, i); });

  fill(data, kCount, rank);
  MOECCL_ASSERT_COMM_OK(moecclBroadcast(data, data, kCount, moecclInt8, 1, comm, nullptr), comm);
  expect_values(data, kCount, "broadcast", [](size_t i) { return value(1, i); });

  fill(mine(), kHalf, rank);
  MOECCL_ASSERT_COMM_OK(moecclAllGather(mine(), data, kHalf, moecclInt8, comm, nullptr), comm);
  expect_values(data, 2 * kHalf, "allgather", [](size_t i) { return value(i >= kHalf, i % kHalf); });

  fill(data, 2 * kHalf, rank);
  MOECCL_ASSERT_COMM_OK(moecclReduceScatter(data, mine(), kHalf, moecclInt8, moecclMax, comm, nullptr), comm);
  expect_values(mine(), kHalf, "reduce_scatter",
                [&](size_t i) { return value(1, i + static_cast<size_t>(rank) * kHalf); });

  if (rank == 0) fill(data, kCount, 1);
  if (rank == 0) {
    MOECCL_ASSERT_COMM_OK(moecclSend(data, kCount, moecclInt8, 1, comm, nullptr), comm);
  } else {
    MOECCL_ASSERT_COMM_OK(moecclRecv(data, kCount, moecclInt8, 0, comm, nullptr), comm);
  }
  expect_values(data, kCount, "send and recv", [](size_t i) { return value(1, i); });
}

TEST(Large, CountsBeyond31BitsAreMovedAndReduced) {
  if (sanitized()) GTEST_SKIP() << "takes minutes under sanitizers";
  const size_t needed = 4 * kHalf;
  if (available_bytes() < 2 * needed)
    GTEST_SKIP() << "needs " << (needed >> 20) << " MiB, and as much again free; " << (available_bytes() >> 20)
                 << " MiB are available";
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 300'000};
  options.config.timeout_ms = 120'000;
  run_ranks(2, run_all, options);
}

}  // namespace
}  // namespace moeccl::testing
