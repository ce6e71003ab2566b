// SPDX-License-Identifier: Apache-2.0
// Ranks that leave and come back, again and again: nothing is left behind.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <numeric>
#include <vector>

#include "tests/conformance/members.h"
#include "tests/support/held.h"

namespace moeccl::testing {
namespace {

// Runs one step of a layer that each token enters twice and leaves with the same numbers.
void use_layer(moecclComm_t comm, int n) {
  constexpr size_t kTokens = 40, kHidden = 32;
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = kHidden * sizeof(float);
  config.type = moecclFloat32;
  config.layout = moecclLayoutExpertMajor;
  config.top_k = 2;
  config.n_experts = 2 * n;
  config.max_tokens = kTokens;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
  std::vector<int32_t> index;
  for (size_t t = 0; t < kTokens; ++t) {
    index.push_back(static_cast<int32_t>(t) % (2 * n));
    index.push_back(static_cast<int32_t>(t + 3) % (2 * n));
  }
  const std::vector<float> weight(index.size(), 0.5f);
  MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), kTokens), comm);
  moecclRoutingInfo_t info{};
  info.size = sizeof(info);
  MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
  std::vector<float> in(kTokens * kHidden), rows(info.n_rows * kHidden), back(in.size());
  std::iota(in.begin(), in.end(), 1.0f);
  MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, in.data(), rows.data(), nullptr), comm);
  MOECCL_ASSERT_COMM_OK(moecclCombine(routing, rows.data(), back.data(), nullptr), comm);
  EXPECT_EQ(in, back);
  MOECCL_EXPECT_OK(moecclRoutingDestroy(routing));
  MOECCL_EXPECT_OK(moecclMoeDestroy(moe));
}

// Rank 2 leaves and comes back, again and again.
void churn(TestHosts* hosts) {
  const int n_rounds = scaled(100);
  constexpr int kWarmUp = 20;
  struct Ids {
    moecclUniqueId id[240];
  };
  const Shared<Ids> ids;
  Meeting made;
  ASSERT_LE(n_rounds + kWarmUp, 240);
  RankOptions options{.mode = RankMode::kProcesses, .deadline_ms = 240'000, .destroy = false};
  options.hosts = hosts;
  run_ranks(
      3,
      [&](int rank, moecclComm_t comm) {
        const int last[] = {2};
        Held before;
        for (int i = 0; i < n_rounds + kWarmUp; ++i) {
          moecclComm_t two = nullptr, three = nullptr;
          if (rank < 2) {
            MOECCL_ASSERT_COMM_OK(moecclCommShrink(comm, i % 2 ? last : nullptr, i % 2, &two, nullptr, 0), comm);
            expect_place(two, rank, 2);
            use_layer(two, 2);
          }
          MOECCL_ASSERT_OK(moecclCommDestroy(comm));
          if (rank == 0) {
            MOECCL_ASSERT_OK(moecclCommGetUniqueId(two, &ids->id[i]));
            made.arrive();
          }
          if (rank == 2) {
            ASSERT_TRUE(made.wait_for(i + 1));
          }
          const moecclConfig_t config = timeouts(20'000);
          MOECCL_ASSERT_OK(
              moecclCommGrow(two, 3, rank == 1 ? nullptr : &ids->id[i], rank < 2 ? -1 : 2, &three, &config));
          if (two != nullptr) {
            MOECCL_ASSERT_OK(moecclCommDestroy(two));
          }
          use_layer(three, 3);
          comm = three;
          if (i + 1 != kWarmUp && i + 1 != n_rounds + kWarmUp) continue;
          for (int wait = 0; wait < 200 && i >= kWarmUp; ++wait) {  // meeting points end on their own
            const Held now = held();
            if (now.threads <= before.threads && now.descriptors <= before.descriptors) break;
            usleep(10'000);
          }
          if (i + 1 == kWarmUp) {
            usleep(200'000);
            before = held();
            continue;
          }
          const Held now = held();
          EXPECT_LE(now.descriptors, before.descriptors);
          EXPECT_LE(now.threads, before.threads);
          if (!sanitized()) {
            EXPECT_LE(now.resident_kib, before.resident_kib + 1024);
          }
          printf("rank %d: %d shrinks and grows: descriptors %zu -> %zu, threads %zu -> %zu, memory %ld -> %ld KiB\n",
                 rank, n_rounds, before.descriptors, now.descriptors, before.threads, now.threads, before.resident_kib,
                 now.resident_kib);
          fflush(stdout);
        }
        MOECCL_EXPECT_OK(moecclCommDestroy(comm));
      },
      options);
}

TEST(Churn, HundredShrinksAndGrowsLeaveNothingBehindOnOneHost) { churn(nullptr); }
TEST(Churn, HundredShrinksAndGrowsLeaveNothingBehindBetweenHosts) {
  MAKE_HOSTS(hosts, .weights = {2, 1}, .named = true);
  churn(hosts.get());
}

}  // namespace
}  // namespace moeccl::testing
