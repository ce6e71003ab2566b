// SPDX-License-Identifier: Apache-2.0
// kill -9 of a rank while experts migrate between hosts. The survivors' epochs differ by at most one, and what each of
// them holds are the experts of its own epoch, complete (moeccl/migrate.h, Epochs).
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/ranks_on_hosts.h"

namespace moeccl::testing {
namespace {

constexpr int kRanks = 4;
constexpr int32_t kExperts = 8;
constexpr size_t kCount = 20'000;

// Element i of an expert as it was sent for an epoch.
int32_t element(uint64_t epoch, int32_t expert, size_t i) {
  return static_cast<int32_t>(epoch * 7919 + static_cast<uint64_t>(expert) * 104'729 + i);
}

// Migrates until a call fails, and returns the layer's epoch.
uint64_t migrate_until_failure(moecclComm_t comm, moecclMigration_t migration, const moecclHybridInfo_t& of,
                               std::vector<int32_t>& held) {
  std::vector<int32_t> own(static_cast<size_t>(of.n_own) * kCount);
  moecclResult_t result = moecclSuccess;
  uint64_t epoch = 0;
  for (const Stopwatch watch; result == moecclSuccess && watch.fair_ms() < patient_ms(10'000);) {
    for (size_t e = 0; e < static_cast<size_t>(of.n_own); ++e)
      for (size_t i = 0; i < kCount; ++i) own[e * kCount + i] = element(epoch + 1, of.own_experts[e], i);
    result = moecclMigrationSend(migration, 0, own.data(), nullptr, nullptr);
    if (result == moecclSuccess) result = moecclMigrationBegin(migration, 0);
    if (result == moecclSuccess) result = moecclMigrationWait(migration, 0, nullptr, held.data(), &epoch);
  }
  EXPECT_EQ(result, moecclRemoteError) << moecclGetLastError(comm);
  moecclMigrationInfo_t info{};
  info.size = sizeof(info);
  MOECCL_EXPECT_COMM_OK(moecclMigrationGetInfo(migration, 0, &info), comm);
  return info.epoch;
}

void survive(moecclComm_t comm, Meeting& ready, std::atomic<uint64_t>& epoch) {
  const int32_t sizes[] = {1, 2};
  moecclHybridConfig_t domains = MOECCL_HYBRID_CONFIG_INIT;
  domains.n_experts = kExperts, domains.n_levels = 2, domains.domain = sizes;
  moecclMigrationConfig_t config = MOECCL_MIGRATION_CONFIG_INIT;
  config.count = kCount, config.type = moecclInt32, config.ratio = 1;
  moecclHybrid_t hybrid = nullptr;
  moecclMigration_t migration = nullptr;
  MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &domains), comm);
  MOECCL_ASSERT_COMM_OK(moecclMigrationCreate(&migration, hybrid, nullptr, &config), comm);
  moecclHybridInfo_t of{};
  of.size = sizeof(of);
  MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &of));
  std::vector<int32_t> held(static_cast<size_t>(of.n_held) * kCount, -1);
  ready.arrive();
  const uint64_t reached = migrate_until_failure(comm, migration, of, held);
  size_t wrong = 0;
  for (size_t e = 0; reached > 0 && e < static_cast<size_t>(of.n_held); ++e)
    for (size_t i = 0; i < kCount; ++i) wrong += held[e * kCount + i] != element(reached, of.held_experts[e], i);
  EXPECT_EQ(wrong, 0u) << "elements that are not those of epoch " << reached;
  epoch = reached + 1;
  MOECCL_EXPECT_OK(moecclMigrationDestroy(migration));
  MOECCL_EXPECT_OK(moecclHybridDestroy(hybrid));
}

TEST(Epochs, OfSurvivorsDifferByOneAtMostAndEachHoldsItsOwnExperts) {
  MAKE_HOSTS(hosts, .weights = {1, 1}, .named = true);
  const int n_kills = scaled(24);
  int apart = 0;
  for (int k = 0; k < n_kills && !HasFailure(); ++k) {
    std::mt19937_64 random(test_seed() * 1000 + static_cast<uint64_t>(k));
    const auto victim = static_cast<int>(random() % kRanks);
    const std::chrono::microseconds delay(random() % 30'000);
    SCOPED_TRACE(::testing::Message() << "MOECCL_TEST_SEED=" << test_seed() << ", kill " << k << " of rank " << victim
                                      << " after " << delay.count() << " us");
    Meeting ready;
    Shared<std::array<std::atomic<uint64_t>, kRanks>> epochs;  // plus 1; 0: not known
    RankOptions options = on(*hosts);
    options.config.topology = "node:2 gpu:2";
    options.may_die = {victim};
    options.on_running = [&](const std::vector<pid_t>& pids) {
      EXPECT_TRUE(ready.wait_for(kRanks));
      std::this_thread::sleep_for(delay);
      kill(pids[static_cast<size_t>(victim)], SIGKILL);
    };
    run_ranks(
        kRanks, [&](int rank, moecclComm_t comm) { survive(comm, ready, (*epochs)[static_cast<size_t>(rank)]); },
        options);
    uint64_t least = UINT64_MAX, most = 0;
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim) continue;
      least = std::min(least, (*epochs)[static_cast<size_t>(r)].load());
      most = std::max(most, (*epochs)[static_cast<size_t>(r)].load());
    }
    EXPECT_LE(most - least, 1u);
    apart += most != least ? 1 : 0;
  }
  printf("%d kills during migration: the epochs of survivors differed after %d\n", n_kills, apart);
}

}  // namespace
}  // namespace moeccl::testing
