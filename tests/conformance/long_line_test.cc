// SPDX-License-Identifier: Apache-2.0
// Operations over a long line, 10 Gbit/s and 20 ms one way, with default settings: results, and that several round
// trips of data are under way at once. With the chunks of short lines, each took more than ten times as long.
#include <gtest/gtest.h>
#include <moeccl/moeccl.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/ranks.h"

namespace {

using moeccl::testing::run_ranks;
using moeccl::testing::Stopwatch;

constexpr size_t kCount = 8 << 20;  // 32 MiB: 27 ms of the line

void over_the_line(const std::function<void(int rank, moecclComm_t comm)>& body, size_t staging_bytes = 0) {
  moeccl::testing::RankOptions options;
  options.config.staging_bytes = staging_bytes;
  options.config.topology = "node:2(bw=1.25GB/s,lat=20ms) gpu:1";
  options.config.pace = 1;
  run_ranks(2, body, options);
}

// `operation` must take far less than it did with one or two usual chunks in each round trip.
void timed(moecclComm_t comm, const std::function<moecclResult_t()>& operation) {
  ASSERT_EQ(operation(), moecclSuccess) << moecclGetLastError(comm);  // touches the memory
  const Stopwatch watch;
  ASSERT_EQ(operation(), moecclSuccess) << moecclGetLastError(comm);
  MOECCL_EXPECT_WITHIN(watch, 200);
}

TEST(LongLine, AllReduce) {
  over_the_line([](int rank, moecclComm_t comm) {
    std::vector<float> in(kCount), out(kCount);
    for (size_t i = 0; i < kCount; ++i) in[i] = static_cast<float>(rank + 1) * static_cast<float>(i % 1000);
    timed(comm,
          [&] { return moecclAllReduce(in.data(), out.data(), kCount, moecclFloat32, moecclSum, comm, nullptr); });
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(out[i], 3 * static_cast<float>(i % 1000)) << i;
  });
}

TEST(LongLine, AllGather) {
  over_the_line([](int rank, moecclComm_t comm) {
    std::vector<int32_t> in(kCount), out(2 * kCount);
    for (size_t i = 0; i < kCount; ++i) in[i] = static_cast<int32_t>(i) * (rank + 1);
    timed(comm, [&] { return moecclAllGather(in.data(), out.data(), kCount, moecclInt32, comm, nullptr); });
    for (size_t i = 0; i < 2 * kCount; ++i)
      ASSERT_EQ(out[i], static_cast<int32_t>(i % kCount) * static_cast<int32_t>(i / kCount + 1)) << i;
  });
}

TEST(LongLine, SendAndReceive) {
  over_the_line([](int rank, moecclComm_t comm) {
    std::vector<int32_t> data(kCount);
    if (rank == 0)
      for (size_t i = 0; i < kCount; ++i) data[i] = static_cast<int32_t>(i);
    timed(comm, [&] {
      return rank == 0 ? moecclSend(data.data(), kCount, moecclInt32, 1, comm, nullptr)
                       : moecclRecv(data.data(), kCount, moecclInt32, 0, comm, nullptr);
    });
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(data[i], static_cast<int32_t>(i));
  });
}

// Returns the page of a layer whose tokens all choose one expert of each rank.
std::string page_of_layer(moecclComm_t comm, size_t n_tokens) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 4096, config.n_experts = 4, config.top_k = 2, config.max_tokens = n_tokens;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  EXPECT_EQ(moecclMoeCreate(&moe, comm, &config), moecclSuccess) << moecclGetLastError(comm);
  std::vector<int32_t> index;
  for (size_t t = 0; t < n_tokens; ++t) index.insert(index.end(), {0, 2});
  EXPECT_EQ(moecclRoutingCreate(&routing, moe, index.data(), nullptr, n_tokens), moecclSuccess);
  std::string page(1 << 16, '\0');
  EXPECT_EQ(moecclMoeExplain(routing, page.data(), page.size(), nullptr), moecclSuccess);
  page.resize(page.find('\0'));
  EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
  EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  return page;
}

TEST(LongLine, ALayerIsAdvisedMoreStagingOnlyWhereItLacksSome) {
  const auto says = [](const std::string& page, const char* words) { return page.find(words) != std::string::npos; };
  over_the_line([&](int, moecclComm_t comm) {
    const std::string page = page_of_layer(comm, 16);
    EXPECT_TRUE(says(page, "long line: level node holds 47.68 MiB in a round trip; this layer has 0% of that")) << page;
    EXPECT_FALSE(says(page, "limits it")) << page;
  });
  over_the_line(
      [&](int, moecclComm_t comm) {
        EXPECT_FALSE(says(page_of_layer(comm, 16), "limits it")) << "one chunk";
        const std::string page = page_of_layer(comm, 2000);
        EXPECT_TRUE(says(page, "%: give MOECCL_STAGING_BYTES of 256.00 MiB")) << page;
      },
      1 << 20);
}

}  // namespace
