// SPDX-License-Identifier: Apache-2.0
#include "src/solve/assignment.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

#include "tests/support/timing.h"
#include "tests/unit/solve/random_problems.h"

#if __has_include(<lemon/network_simplex.h>)
#include <lemon/network_simplex.h>
#include <lemon/smart_graph.h>
#define MOECCL_HAVE_LEMON 1
#endif

namespace moeccl::solve {
namespace {

using testing::Costs;

struct Solved {
  std::vector<int32_t> bin;
  int64_t total = -1;
};
Solved solve(const Costs& c) {
  Solved s;
  s.bin.assign(static_cast<size_t>(c.n_items), -1);
  EXPECT_EQ(
      moecclSolveAssignment(c.cost.data(), c.capacity.data(), c.n_items, c.n_bins, s.bin.data(), &s.total, nullptr, 0),
      moecclSuccess)
      << moecclGetLastError(nullptr);
  return s;
}

// Expects that capacities are met and that the total is the sum of the chosen costs.
void expect_consistent(const Costs& c, const Solved& s) {
  std::vector<int32_t> room = c.capacity;
  int64_t total = 0;
  for (size_t i = 0; i < s.bin.size(); ++i) {
    ASSERT_GE(s.bin[i], 0);
    ASSERT_LT(s.bin[i], c.n_bins);
    ASSERT_GE(--room[static_cast<size_t>(s.bin[i])], 0) << "bin " << s.bin[i] << " is over its capacity";
    total += c.cost[i * static_cast<size_t>(c.n_bins) + static_cast<size_t>(s.bin[i])];
  }
  EXPECT_EQ(total, s.total);
}

int64_t cheapest_by_enumeration(const Costs& c, std::vector<int32_t>& room, size_t item) {
  if (item == static_cast<size_t>(c.n_items)) return 0;
  int64_t best = INT64_MAX / 2;
  for (size_t b = 0; b < room.size(); ++b) {
    if (room[b] == 0) continue;
    --room[b];
    best = std::min(best, c.cost[item * room.size() + b] + cheapest_by_enumeration(c, room, item + 1));
    ++room[b];
  }
  return best;
}

TEST(Assignment, EqualsEnumerationOnSmallInstances) {
  SplitMix64 random(testing::seed());
  for (int round = 0; round < 400; ++round) {
    const Costs c = testing::random_costs(random, static_cast<int32_t>(random.below(8)),
                                          1 + static_cast<int32_t>(random.below(4)), false);
    const Solved s = solve(c);
    expect_consistent(c, s);
    std::vector<int32_t> room = c.capacity;
    ASSERT_EQ(s.total, cheapest_by_enumeration(c, room, 0)) << "round " << round;
  }
}

#ifdef MOECCL_HAVE_LEMON
// An independent solver: minimum-cost flow by LEMON's network simplex.
int64_t lemon_optimum(const Costs& c) {
  lemon::SmartDigraph graph;
  lemon::SmartDigraph::NodeMap<int64_t> supply(graph);
  std::vector<lemon::SmartDigraph::Node> item, bin;
  for (int32_t i = 0; i < c.n_items; ++i) {
    item.push_back(graph.addNode());
    supply[item.back()] = 1;
  }
  for (int32_t b = 0; b < c.n_bins; ++b) {
    bin.push_back(graph.addNode());
    supply[bin.back()] = -c.capacity[static_cast<size_t>(b)];
  }
  lemon::SmartDigraph::ArcMap<int64_t> cost(graph);
  for (size_t i = 0; i < item.size(); ++i)
    for (size_t b = 0; b < bin.size(); ++b) cost[graph.addArc(item[i], bin[b])] = c.cost[i * bin.size() + b];
  lemon::NetworkSimplex<lemon::SmartDigraph, int64_t, int64_t> simplex(graph);
  simplex.costMap(cost).supplyMap(supply);
  EXPECT_EQ(simplex.run(), simplex.OPTIMAL);
  return simplex.totalCost<int64_t>();
}

TEST(Assignment, EqualsLemonsNetworkSimplexOn1000RandomInstances) {
  SplitMix64 random(testing::seed() + 7);
  for (int round = 0; round < 1000; ++round) {
    const auto n_bins = 1 + static_cast<int32_t>(random.below(round % 10 == 0 ? 40 : 9));
    const auto n_items = 1 + static_cast<int32_t>(random.below(round % 10 == 0 ? 600 : 150));
    const Costs c = testing::random_costs(random, n_items, n_bins, random.below(2) == 0);
    const Solved s = solve(c);
    expect_consistent(c, s);
    ASSERT_EQ(s.total, lemon_optimum(c)) << "round " << round << ": " << n_items << " items, " << n_bins << " bins";
  }
}
#else
TEST(Assignment, EqualsLemonsNetworkSimplexOn1000RandomInstances) {
  GTEST_SKIP() << "liblemon-dev is not installed: tools/deps installs it";
}
#endif

// Certifies the optimum of instances that are too large for an oracle: no cycle of moves is negative.
TEST(Assignment, LeavesNoCycleOfMovesThatLowersTheCost) {
  SplitMix64 random(testing::seed() + 3);
  const Costs c = testing::random_costs(random, 3000, 24, true);
  const Solved s = solve(c);
  expect_consistent(c, s);
  const auto n = static_cast<size_t>(c.n_bins);
  std::vector<int64_t> length(n * n, INT64_MAX / 4);
  for (size_t i = 0; i < s.bin.size(); ++i) {
    const auto u = static_cast<size_t>(s.bin[i]);
    for (size_t v = 0; v < n; ++v)
      length[u * n + v] = std::min<int64_t>(length[u * n + v], c.cost[i * n + v] - c.cost[i * n + u]);
  }
  for (size_t k = 0; k < n; ++k)  // Floyd and Warshall
    for (size_t u = 0; u < n; ++u)
      for (size_t v = 0; v < n; ++v)
        length[u * n + v] = std::min(length[u * n + v], length[u * n + k] + length[k * n + v]);
  for (size_t u = 0; u < n; ++u) EXPECT_GE(length[u * n + u], 0) << "a negative cycle passes bin " << u;
}

// All items are alike, so under the right prices every bin costs the same. When equal bins did not share the items,
// this took a hundred times as long.
TEST(Assignment, SpreadsItemsOverBinsOfEqualCost) {
  Costs c;
  c.n_items = 8192, c.n_bins = 128;
  c.capacity.assign(128, 64);
  for (int32_t i = 0; i < c.n_items; ++i)
    for (int32_t b = 0; b < c.n_bins; ++b) c.cost.push_back(b);
  const tests::Stopwatch watch;
  const Solved s = solve(c);
  MOECCL_EXPECT_WITHIN(watch, 500);
  expect_consistent(c, s);
}

// Samples of one token cost 0 to 8 each, so a great many moves tie. When each of them was a path of its own, this took
// 150 times as long.
TEST(Assignment, TakesTimeInProportionToItemsThatTie) {
  SplitMix64 random(testing::seed() + 4);
  Costs c;
  c.n_items = 131072, c.n_bins = 8;
  c.capacity.assign(8, c.n_items / 8);
  for (int32_t i = 0; i < c.n_items; ++i) {
    int32_t cost[8] = {8, 8, 8, 8, 8, 8, 8, 8};
    for (int k = 0; k < 8; ++k) --cost[std::min(random.below(8), random.below(8))];
    c.cost.insert(c.cost.end(), cost, cost + 8);
  }
  const tests::Stopwatch watch;
  const Solved s = solve(c);
  MOECCL_EXPECT_WITHIN(watch, 500);
  expect_consistent(c, s);
}

TEST(Assignment, UsesTheCallersWorkspaceAndSaysHowMuch) {
  SplitMix64 random(5);
  const Costs c = testing::random_costs(random, 100, 6, true);
  size_t bytes = 0;
  ASSERT_EQ(moecclSolveAssignmentWorkspace(c.n_items, c.n_bins, &bytes), moecclSuccess);
  std::vector<char> memory(bytes + 1);
  std::vector<int32_t> bin(100);
  int64_t total = 0;
  char* odd = memory.data() + 1;
  ASSERT_EQ(moecclSolveAssignment(c.cost.data(), c.capacity.data(), 100, 6, bin.data(), &total, odd, bytes),
            moecclSuccess);
  EXPECT_EQ(total, solve(c).total);
  EXPECT_EQ(moecclSolveAssignment(c.cost.data(), c.capacity.data(), 100, 6, bin.data(), &total, odd, bytes - 1),
            moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("moecclSolveAssignmentWorkspace"), std::string::npos);
}

TEST(Assignment, NamesBadArguments) {
  const int32_t cost[] = {1, 2, 3, -4}, capacity[] = {1, 1}, negative[] = {-1, 3}, short_of[] = {1, 0};
  int32_t bin[2];
  const auto says = [&](const int32_t* c, const int32_t* cap, const char* word) {
    EXPECT_EQ(moecclSolveAssignment(c, cap, 2, 2, bin, nullptr, nullptr, 0), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
  };
  says(cost, capacity, "cost[1][1] is -4");
  says(cost, negative, "capacity[0] is -1");
  says(cost, short_of, "capacity sums to 1");
  says(nullptr, capacity, "cost is NULL");
  says(cost, nullptr, "capacity is NULL");
}

}  // namespace
}  // namespace moeccl::solve
