// SPDX-License-Identifier: Apache-2.0
#include "src/plan/cost.h"

#include <gtest/gtest.h>

#include "src/algo/algorithm.h"
#include "src/plan/binding.h"
#include "src/plan/checker.h"
#include "tests/unit/plan/hand_plans.h"

namespace moeccl::plan {
namespace {

using namespace testing;

LevelTree nodes(std::vector<uint32_t> sizes, LinkCost link) {
  return *LevelTree::from_sizes({{"node", link, std::move(sizes)}});
}

TEST(Cost, GrowsWithBytes) {
  const LevelTree tree = LevelTree::flat(4);
  double before = 0;
  for (uint64_t chunk = 4; chunk <= 4 << 12; chunk *= 4) {
    const double ns = price(direct_all_reduce(4, chunk, 3), tree, Profile()).total_ns;
    EXPECT_GT(ns, before) << chunk;
    before = ns;
  }
}

TEST(Cost, CountsBytesBetweenGroups) {
  const uint64_t chunk = 16, n_chunks = 3, block = chunk * n_chunks * 64;
  const LevelTree tree = nodes({1, 3}, {0, 0.25});
  const Cost cost = price(flat_all_to_all(4, chunk, n_chunks), tree, Profile());
  EXPECT_EQ(cost.level_bytes, (std::vector<uint64_t>{6 * block, 6 * block}));
  EXPECT_EQ(cost.sent_bytes, std::vector<uint64_t>(4, 3 * block));
}

// Two nodes of four ranks exchange 16 blocks each way over an uplink that is the bottleneck and always busy.
TEST(Cost, TwoNodesRunAtThePaceOfTheirUplink) {
  const uint64_t chunk = 1024, n_chunks = 8;
  const LevelTree tree = nodes({4, 4}, {1000, 0.25});
  const Plan plan = flat_all_to_all(8, chunk, n_chunks);
  ASSERT_TRUE(check(plan).ok());
  const double wire_ns = 16.0 * chunk * n_chunks * 64 / 0.25;
  const double ns = price(plan, tree, Profile()).total_ns;
  EXPECT_GT(ns, wire_ns);
  EXPECT_LT(ns, 1.15 * wire_ns);
}

TEST(Cost, ALatencyOfAProfileLeavesTheTreeItsBandwidth) {
  const LevelTree tree = nodes({4, 4}, {1000, 0.25});
  const Plan plan = flat_all_to_all(8, 1024, 8);
  Profile profile;
  profile.links = {{5000, 0}, {}};
  EXPECT_EQ(price(plan, tree, profile).total_ns, price(plan, tree, Profile()).total_ns);
}

TEST(Cost, AProfileOverridesTheLinksOfTheTree) {
  const LevelTree tree = nodes({2, 2}, {0, 1});
  Profile slow;
  slow.links = {{0, 0.01}};
  const Plan plan = flat_all_to_all(4, 256, 4);
  EXPECT_GT(price(plan, tree, slow).total_ns, 10 * price(plan, tree, Profile()).total_ns);
}

TEST(Cost, LatencyIsPaidOncePerRoundTrip) {
  const Plan plan = broadcast_with_credits(1, 9);  // two slots: every second chunk waits for a credit
  const double ns = price(plan, nodes({1, 1}, {1e6, 0}), Profile()).total_ns;
  EXPECT_GT(ns, 9e6);
  EXPECT_LT(ns, 9.2e6);
}

TEST(Cost, RanksThatShareACoreTakeTurns) {
  const Plan plan = direct_all_reduce(8, 1024, 2);
  Profile few, many;
  few.cores = 2;
  many.cores = 8;
  few.host_copy_bytes_per_ns = many.host_copy_bytes_per_ns = 1000;  // memory is not the shared resource
  const LevelTree tree = LevelTree::flat(8);
  const Cost shared = price(plan, tree, few), own = price(plan, tree, many);
  EXPECT_GT(shared.total_ns, 2 * own.total_ns);
  EXPECT_GT(shared.path.switch_ns, 0);
  EXPECT_EQ(own.path.switch_ns, 0);
}

// From kStreamSharedBytes on, a rank's stores to other ranks' outputs cost as much as stores past the cache.
TEST(Cost, WhatOthersReadIsStoredPastTheCache) {
  const LevelTree tree = LevelTree::flat(2);
  Profile slow, fast;
  slow.stream_bytes_per_ns = 0.01;
  slow.host_copy_bytes_per_ns = fast.host_copy_bytes_per_ns = 1000;
  slow.cache_bytes = fast.cache_bytes = 1 << 30;
  const uint64_t least = 2 * kStreamSharedBytes / 64;  // elements of 64 bytes in two parts
  const Plan large = direct_all_reduce(2, least, 1), small = direct_all_reduce(2, least - 2, 1);
  EXPECT_GT(price(large, tree, slow).total_ns, price(large, tree, fast).total_ns + kStreamSharedBytes / 0.02);
  EXPECT_EQ(price(small, tree, slow).total_ns, price(small, tree, fast).total_ns);
}

// For ranks of the same core, staging that stays in a cache is as cheap to read as memory; for others it is more
// expensive. In both cases the prices are close enough to be tried (Selector's kCloseTo).
TEST(Cost, WhatLiesModifiedInAnotherCoresCacheIsDearToRead) {
  const LevelTree tree = LevelTree::flat(2);
  Shape shape;
  shape.op = moecclOpAllToAll;
  shape.n_ranks = 2;
  shape.count = 32 << 10;
  const auto takes = [&](const char* name, uint32_t cores) {
    Profile p;
    p.cores = cores;
    return price(algo::build_all(*algo::find(shape.op, name), shape, tree), tree, p).total_ns;
  };
  const double same_core = takes("cached", 1) / takes("staged", 1), others = takes("cached", 2) / takes("staged", 2);
  EXPECT_LT(same_core, 1.1);
  EXPECT_GT(others, same_core);
  EXPECT_LT(others, 1.6);
}

TEST(Cost, ManyChunksAreExtrapolatedAtTheirPace) {
  const LevelTree tree = LevelTree::flat(4);
  for (const bool direct : {false, true}) {
    const auto plan_of = [&](uint32_t n_chunks) {
      Plan plan = direct ? direct_all_reduce(4, 256, n_chunks) : flat_all_to_all(4, 256, n_chunks);
      plan.shape.count = 256 * 640;  // the same memory, so the same rates
      return plan;
    };
    const Cost all = price(plan_of(640), tree, Profile()), some = price(plan_of(64), tree, Profile());
    EXPECT_EQ(all.priced_chunks, 64u);
    EXPECT_NEAR(all.total_ns / some.total_ns, 10, 0.5);
    EXPECT_NEAR(static_cast<double>(all.sent_bytes[0]) / static_cast<double>(some.sent_bytes[0]), 10, 0.01);
  }
}

TEST(Cost, PathPartsAddUpToTheTotal) {
  for (const Plan& plan : {direct_all_reduce(6, 512, 5), flat_all_to_all(5, 128, 7), broadcast_with_credits(64, 300)}) {
    const Cost cost = price(plan, LevelTree::flat(plan.shape.n_ranks), Profile());
    const CriticalPath& p = cost.path;
    EXPECT_NEAR(p.copy_ns + p.reduce_ns + p.link_ns + p.switch_ns + p.step_ns, cost.total_ns, 0.02 * cost.total_ns);
    EXPECT_NE(p.summary().find("ends at rank"), std::string::npos);
  }
}

TEST(Cost, IsTheSameEachTime) {
  const Plan plan = flat_all_to_all(9, 100, 6);
  const LevelTree tree = nodes({4, 5}, {500, 1});
  EXPECT_EQ(price(plan, tree, Profile()).total_ns, price(plan, tree, Profile()).total_ns);
}

}  // namespace
}  // namespace moeccl::plan
