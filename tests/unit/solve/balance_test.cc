// SPDX-License-Identifier: Apache-2.0
#include "src/solve/balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <ctime>
#include <limits>
#include <set>
#include <string>
#include <thread>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

struct Case {
  moecclBalanceProblem_t p = MOECCL_BALANCE_PROBLEM_INIT;
  std::vector<double> load;
  std::vector<int32_t> current, slots;
  moecclBalanceAnswer_t answer{};

  moecclResult_t solve() {
    p.load = load.data();
    p.current = current.empty() ? nullptr : current.data();
    slots.assign(static_cast<size_t>(std::max(0, p.n_layers)) * static_cast<size_t>(std::max(0, p.n_slots)), -7);
    answer.size = sizeof(answer);
    return moecclSolveBalance(&p, slots.data(), &answer);
  }
  bool by_node() const { return p.n_groups % p.n_nodes == 0; }
  const int32_t* layer(const std::vector<int32_t>& of, int32_t l) const {
    return of.data() + static_cast<size_t>(l) * static_cast<size_t>(p.n_slots);
  }
  double load_of(int32_t l, int32_t e) const {
    return load[static_cast<size_t>(l) * static_cast<size_t>(p.n_experts) + static_cast<size_t>(e)];
  }
  // The load of one layer's fullest GPU.
  double fullest(const std::vector<int32_t>& of, int32_t l) const {
    const int32_t *at = layer(of, l), width = p.n_slots / p.n_gpus;
    double most = 0;
    for (int32_t g = 0; g < p.n_gpus; ++g) {
      double sum = 0;
      for (int32_t s = g * width; s < (g + 1) * width; ++s)
        sum += load_of(l, at[s]) / static_cast<double>(std::count(at, at + p.n_slots, at[s]));
      most = std::max(most, sum);
    }
    return most;
  }
  int64_t moved(int32_t l) const {
    const int32_t width = p.n_slots / p.n_gpus;
    int64_t n = 0;
    for (int32_t g = 0; g < p.n_gpus; ++g) {
      const int32_t *now = layer(current, l) + g * width, *then = layer(slots, l) + g * width;
      const std::set<int32_t> had(now, now + width), has(then, then + width);
      for (const int32_t e : has) n += had.count(e) == 0;
    }
    return n;
  }
  double cost(int32_t l) const {
    return fullest(slots, l) + (current.empty() ? 0 : p.move_cost * static_cast<double>(moved(l)));
  }
  bool whole(const std::vector<int32_t>& of, int32_t l) const {
    const std::set<int32_t> experts(layer(of, l), layer(of, l) + p.n_slots);
    return *experts.begin() >= 0 && static_cast<int32_t>(experts.size()) == p.n_experts;
  }
  bool groups_stay(const std::vector<int32_t>& of, int32_t l) const {
    if (!by_node()) return true;
    for (int32_t n = 0; n < p.n_nodes; ++n) {
      std::set<int32_t> groups;
      for (int32_t s = n * p.n_slots / p.n_nodes; s < (n + 1) * p.n_slots / p.n_nodes; ++s)
        groups.insert(layer(of, l)[s] * p.n_groups / p.n_experts);
      if (static_cast<int32_t>(groups.size()) != p.n_groups / p.n_nodes) return false;
    }
    return true;
  }
};

Case shaped(int32_t layers, int32_t experts, int32_t slots, int32_t groups, int32_t nodes, int32_t gpus) {
  Case c;
  c.p.n_layers = layers, c.p.n_experts = experts, c.p.n_slots = slots;
  c.p.n_groups = groups, c.p.n_nodes = nodes, c.p.n_gpus = gpus;
  return c;
}

void draw_loads(SplitMix64& random, Case& c) {
  const uint64_t manner = random.below(5);
  c.load.clear();
  for (int32_t i = 0; i < c.p.n_layers * c.p.n_experts; ++i) {
    const double u = random.unit();
    c.load.push_back(manner == 0   ? u
                     : manner == 1 ? std::floor(4 * u)  // ties and zeros
                     : manner == 2 ? std::pow(u, 12)    // a few take nearly all
                     : manner == 3 ? std::floor(1000 * u)
                                   : 1e-3 + std::pow(1e3, u));
  }
}

Case random_case(SplitMix64& random) {
  const auto up_to = [&](uint64_t most) { return 1 + static_cast<int32_t>(random.below(most)); };
  Case c;
  c.p.n_nodes = up_to(4);
  c.p.n_gpus = c.p.n_nodes * up_to(4);
  c.p.n_groups = random.below(2) ? c.p.n_nodes * up_to(3) : up_to(3);
  c.p.n_experts = c.p.n_groups * up_to(4);
  const int32_t least = (c.p.n_experts + c.p.n_gpus - 1) / c.p.n_gpus;
  c.p.n_slots = c.p.n_gpus * (least + static_cast<int32_t>(random.below(3)));
  c.p.n_layers = up_to(3);
  draw_loads(random, c);
  return c;
}

TEST(Balance, WithoutWorkTheExampleOfEplbGivesItsPlacement) {
  Case c = shaped(2, 12, 16, 4, 2, 8);
  c.load = {90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86, 20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27};
  c.p.max_work = -1;
  ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
  EXPECT_EQ(c.slots, (std::vector<int32_t>{5, 6,  5, 7, 8, 4,  3, 4, 10, 9, 10, 2, 0, 1, 11, 1,
                                           7, 10, 6, 8, 6, 11, 8, 9, 2,  4, 5,  1, 5, 0, 3,  1}));
  EXPECT_DOUBLE_EQ(c.answer.balance, c.answer.balance_greedy);
}

// EPLB's global policy, with its loops: each replica to the first of the largest shares, each share, the largest first,
// to the first of the lightest GPUs with a free slot.
std::vector<int32_t> eplb_global(const Case& c, int32_t l) {
  std::vector<float> load;
  for (int32_t e = 0; e < c.p.n_experts; ++e) load.push_back(static_cast<float>(c.load_of(l, e)));
  std::vector<int32_t> count(load.size(), 1), of(load.size());
  std::iota(of.begin(), of.end(), 0);
  while (of.size() < static_cast<size_t>(c.p.n_slots)) {
    size_t most = 0;
    for (size_t e = 1; e < load.size(); ++e)
      if (load[e] / static_cast<float>(count[e]) > load[most] / static_cast<float>(count[most])) most = e;
    ++count[most];
    of.push_back(static_cast<int32_t>(most));
  }
  const auto share = [&](int32_t e) {
    return load[static_cast<size_t>(e)] / static_cast<float>(count[static_cast<size_t>(e)]);
  };
  const size_t width = of.size() / static_cast<size_t>(c.p.n_gpus);
  if (width == 1) return of;
  std::stable_sort(of.begin(), of.end(), [&](int32_t a, int32_t b) { return share(a) > share(b); });
  std::vector<std::vector<int32_t>> gpus(static_cast<size_t>(c.p.n_gpus));
  std::vector<float> sum(gpus.size());
  for (const int32_t e : of) {
    size_t to = gpus.size();
    for (size_t g = 0; g < gpus.size(); ++g)
      if (gpus[g].size() < width && (to == gpus.size() || sum[g] < sum[to])) to = g;
    gpus[to].push_back(e);
    sum[to] += share(e);
  }
  std::vector<int32_t> slots;
  for (const auto& g : gpus) slots.insert(slots.end(), g.begin(), g.end());
  return slots;
}

TEST(Balance, WithoutWorkTheGlobalPolicyIsEplbs) {
  SplitMix64 random(testing::seed());
  for (int round = 0; round < 500; ++round) {
    Case c = random_case(random);
    c.p.n_groups = 1, c.p.n_nodes = 1, c.p.max_work = -1;
    std::fill_n(c.load.begin(), 1, 5.0);  // a layer without load is another case
    c.p.n_layers = 1;
    ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    ASSERT_EQ(c.slots, eplb_global(c, 0)) << "round " << round;
  }
}

TEST(Balance, PlacementsAreValidNeverWorseThanEplbsAndNoBetterThanTheBound) {
  SplitMix64 random(testing::seed() + 1);
  int better = 0;
  for (int round = 0; round < 300; ++round) {
    Case c = random_case(random), greedy = c;
    c.p.max_work = 20000, greedy.p.max_work = -1;
    ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    ASSERT_EQ(greedy.solve(), moecclSuccess);
    double mean = 0, fullest = 0;
    for (int32_t l = 0; l < c.p.n_layers; ++l) {
      ASSERT_TRUE(c.whole(c.slots, l) && c.groups_stay(c.slots, l)) << "round " << round;
      ASSERT_LE(c.fullest(c.slots, l), greedy.fullest(greedy.slots, l) * (1 + 1e-12)) << "round " << round;
      for (int32_t e = 0; e < c.p.n_experts; ++e) mean += c.load_of(l, e) / c.p.n_gpus;
      fullest += c.fullest(c.slots, l);
    }
    ASSERT_NEAR(c.answer.balance, fullest > 0 ? mean / fullest : 1, 1e-9);
    ASSERT_LE(c.answer.balance, c.answer.balance_bound * (1 + 1e-12)) << "round " << round;
    ASSERT_DOUBLE_EQ(c.answer.balance_greedy, greedy.answer.balance);
    better += c.answer.balance > c.answer.balance_greedy * 1.001;
  }
  EXPECT_GT(better, 60);
}

// Returns the least cost of all placements.
double optimum(const Case& c) {
  Case all = c;
  double least = std::numeric_limits<double>::infinity();
  all.slots.assign(static_cast<size_t>(c.p.n_slots), 0);
  for (;;) {
    if (all.whole(all.slots, 0) && all.groups_stay(all.slots, 0)) least = std::min(least, all.cost(0));
    size_t s = 0;
    while (s < all.slots.size() && ++all.slots[s] == c.p.n_experts) all.slots[s++] = 0;
    if (s == all.slots.size()) return least;
  }
}

TEST(Balance, SmallShapesReachTheOptimumOfAllPlacements) {
  SplitMix64 random(testing::seed() + 2);
  const Case shapes[] = {shaped(1, 4, 6, 1, 1, 3), shaped(1, 4, 6, 1, 1, 2), shaped(1, 3, 6, 1, 1, 2),
                         shaped(1, 5, 6, 1, 1, 3), shaped(1, 4, 6, 2, 2, 2), shaped(1, 3, 8, 1, 1, 4)};
  for (int round = 0; round < 60; ++round) {
    Case c = shapes[static_cast<size_t>(round) % std::size(shapes)];
    draw_loads(random, c);
    c.load[0] += 1;
    c.p.tolerance = 1e-9, c.p.max_work = 1 << 18;
    ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    ASSERT_NEAR(c.cost(0), optimum(c), 1e-6 * c.cost(0)) << "round " << round;
    c.current = c.slots;
    draw_loads(random, c);
    c.load[0] += 1;
    c.p.move_cost = 0.1 * random.unit() * c.fullest(c.current, 0);
    ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    ASSERT_NEAR(c.cost(0), optimum(c), 1e-6 * c.cost(0)) << "round " << round << ", from there";
  }
}

TEST(Balance, AShapeOfDeepSeekV3ReachesItsBound) {
  SplitMix64 random(testing::seed() + 3);
  for (const int32_t nodes : {1, 4}) {
    Case c = shaped(2, 256, 288, 8, nodes, 32);
    for (int32_t i = 0; i < 512; ++i) c.load.push_back(random.unit());
    ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    EXPECT_GT(c.answer.balance * 1.0011, c.answer.balance_bound);
    EXPECT_GT(c.answer.balance, c.answer.balance_greedy);
  }
}

TEST(Balance, MovesArePriced) {
  SplitMix64 random(testing::seed() + 4);
  int fewer = 0;
  for (int round = 0; round < 200; ++round) {
    Case c = random_case(random);
    c.p.max_work = 20000;
    ASSERT_EQ(c.solve(), moecclSuccess);
    c.current = c.slots;
    for (double& load : c.load) load *= std::exp(random.unit());
    Case free = c;
    c.p.move_cost = 0.05 * random.unit();
    Case greedy = c;
    greedy.p.max_work = -1;
    for (Case* solved : {&c, &greedy, &free}) ASSERT_EQ(solved->solve(), moecclSuccess);
    int64_t moves = 0, kept = 0;
    for (int32_t l = 0; l < c.p.n_layers; ++l) {
      ASSERT_TRUE(c.whole(c.slots, l) && c.groups_stay(c.slots, l));
      moves += c.moved(l);
      kept += std::equal(c.layer(c.slots, l), c.layer(c.slots, l) + c.p.n_slots, c.layer(c.current, l));
      ASSERT_LE(c.cost(l), c.fullest(c.current, l) * 1.001 + 1e-12) << "round " << round;
      ASSERT_LE(c.cost(l), greedy.cost(l) * 1.001 + 1e-12) << "round " << round;
      ASSERT_LE(free.fullest(free.slots, l), greedy.fullest(greedy.slots, l) * (1 + 1e-12));
    }
    ASSERT_EQ(c.answer.moved, moves);
    ASSERT_EQ(c.answer.kept_layers, kept);
    fewer += c.answer.moved < greedy.answer.moved;
    c.p.move_cost = 1e9;
    ASSERT_EQ(c.solve(), moecclSuccess);
    ASSERT_EQ(c.answer.moved, 0);
    ASSERT_GE(c.answer.balance, c.answer.balance_before * 0.999);
  }
  EXPECT_GT(fewer, 40);
}

TEST(Balance, OneHotExpertMovesNoMoreThanItMust) {
  Case c = shaped(1, 64, 72, 1, 1, 8);
  SplitMix64 random(testing::seed() + 5);
  for (int32_t e = 0; e < 64; ++e) c.load.push_back(50 + random.unit());
  ASSERT_EQ(c.solve(), moecclSuccess);
  c.current = c.slots;
  c.load[5] *= 3;
  c.p.move_cost = 0.5;  // a thousandth of a GPU's load
  ASSERT_EQ(c.solve(), moecclSuccess);
  EXPECT_GT(c.answer.balance, 0.985);
  EXPECT_LT(c.answer.balance_before, 0.95);
  EXPECT_LE(c.answer.moved, 20);  // EPLB's own placement moves most of the 72
  for (int32_t g = 0; g < 8; ++g) {
    const int32_t *now = &c.current[static_cast<size_t>(9 * g)], *then = &c.slots[static_cast<size_t>(9 * g)];
    for (int32_t k = 0; k < 9; ++k) {
      const bool stays = std::count(now, now + 9, now[k]) == 1 && std::count(then, then + 9, now[k]) == 1;
      EXPECT_TRUE(!stays || then[k] == now[k]) << "GPU " << g << ", slot " << k;
    }
  }
}

TEST(Balance, PermutedGpusAndNodesAreRecognised) {
  Case c = shaped(1, 24, 32, 4, 2, 8);
  SplitMix64 random(testing::seed() + 6);
  for (int32_t e = 0; e < 24; ++e) c.load.push_back(random.unit());
  c.p.max_work = -1;
  ASSERT_EQ(c.solve(), moecclSuccess);
  c.current = c.slots;
  std::reverse(c.current.begin(), c.current.end());
  ASSERT_EQ(c.solve(), moecclSuccess);
  EXPECT_EQ(c.slots, c.current);
  EXPECT_EQ(c.answer.moved, 0);
}

// Nodes that are renamed first may leave fewer experts on their GPUs than EPLB's placement as it is.
TEST(Balance, NoMoreExpertsMoveThanWithEplbsPlacementAsItIs) {
  Case c = shaped(1, 8, 12, 2, 2, 6);
  c.load = {3, 10, 8, 14, 9, 4, 7, 19};
  c.p.max_work = -1;
  ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
  c.current = {6, 0, 7, 5, 1, 0, 4, 0, 2, 7, 7, 0};
  c.p.move_cost = 1000, c.p.max_work = 0;
  ASSERT_EQ(c.moved(0), 6) << "of EPLB's";
  ASSERT_EQ(c.solve(), moecclSuccess);
  EXPECT_LE(c.answer.moved, 6);
}

// A unit of work takes about the same time in all shapes.
TEST(Balance, WorkBoundsTheTimeAlsoOfWideGpus) {
  const auto seconds = [](int32_t width) {
    Case c = shaped(1, 3 * width, 4 * width, 1, 1, 4);
    SplitMix64 random(8);
    for (int32_t e = 0; e < c.p.n_experts; ++e) c.load.push_back(std::pow(random.unit(), 3));
    c.p.tolerance = 1e-12, c.p.max_work = 1 << 21;
    const std::clock_t begun = std::clock();
    EXPECT_EQ(c.solve(), moecclSuccess);
    return static_cast<double>(std::clock() - begun) / CLOCKS_PER_SEC;
  };
  const double narrow = seconds(8), wide = seconds(512);
  EXPECT_LT(wide, 8 * narrow);
}

TEST(Balance, GroupsAndNodesThatDoNotDivideMeanNothingAsInEplb) {
  Case c = shaped(1, 4, 8, 1, 1, 4), odd = c;
  c.load = odd.load = {1, 2, 3, 4};
  ASSERT_EQ(c.solve(), moecclSuccess);
  for (const auto& [groups, nodes] : {std::pair(9, 2), std::pair(3, 5)}) {
    odd.p.n_groups = groups, odd.p.n_nodes = nodes;
    ASSERT_EQ(odd.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    EXPECT_EQ(odd.slots, c.slots);
  }
}

TEST(Balance, ACurrentPlacementMayLackExpertsOrSplitGroups) {
  Case c = shaped(1, 8, 12, 2, 2, 4);
  c.load = {1, 2, 3, 4, 5, 6, 7, 8};
  for (const std::vector<int32_t>& current :
       {std::vector<int32_t>(12, -1), std::vector<int32_t>{0, 1, 2, 3, 0, 1, 4, 5, 6, -1, 4, 5},
        std::vector<int32_t>{0, 4, 1, 5, 2, 6, 3, 7, 0, 4, 1, 5}}) {
    c.current = current;
    c.p.move_cost = 1;
    ASSERT_EQ(c.solve(), moecclSuccess) << moecclGetLastError(nullptr);
    EXPECT_TRUE(c.whole(c.slots, 0) && c.groups_stay(c.slots, 0));
    EXPECT_EQ(c.answer.moved, c.moved(0));
    EXPECT_EQ(c.answer.balance_before > 0, c.whole(current, 0));
  }
}

TEST(Balance, LayersWithoutLoadKeepWhatTheyHave) {
  Case c = shaped(1, 4, 8, 1, 1, 2);
  c.load = {0, 0, 0, 0};
  ASSERT_EQ(c.solve(), moecclSuccess);
  EXPECT_EQ(c.answer.balance, 1);
  for (int32_t e = 0; e < 4; ++e) EXPECT_EQ(std::count(c.slots.begin(), c.slots.end(), e), 2) << "expert " << e;
  c.current = {0, 0, 0, 0, 0, 1, 2, 3};
  ASSERT_EQ(c.solve(), moecclSuccess);
  EXPECT_EQ(c.slots, c.current);
  c.load = {0, 0, 3, 0};  // experts without load keep a replica
  ASSERT_EQ(c.solve(), moecclSuccess);
  EXPECT_TRUE(c.whole(c.slots, 0));
}

TEST(Balance, EqualInputsGiveEqualAnswersOnAllThreadsAndForEachLayerAlone) {
  SplitMix64 random(testing::seed() + 7);
  Case c = shaped(3, 64, 96, 8, 2, 16);
  draw_loads(random, c);
  std::vector<Case> again(3, c);
  std::vector<std::thread> threads;
  for (Case& one : again) threads.emplace_back([&one] { EXPECT_EQ(one.solve(), moecclSuccess); });
  for (std::thread& thread : threads) thread.join();
  for (const Case& one : again) EXPECT_EQ(one.slots, again[0].slots);
  for (int32_t l = 0; l < 3; ++l) {
    Case alone = shaped(1, 64, 96, 8, 2, 16);
    alone.load.assign(c.load.begin() + 64 * l, c.load.begin() + 64 * (l + 1));
    ASSERT_EQ(alone.solve(), moecclSuccess);
    EXPECT_TRUE(std::equal(alone.slots.begin(), alone.slots.end(), again[0].layer(again[0].slots, l)));
  }
}

TEST(Balance, WhatCannotBeIsRefused) {
  const auto refused = [](const std::function<void(Case&)>& change, const std::string& sentence) {
    Case c = shaped(1, 4, 8, 2, 2, 4);
    c.load = {1, 2, 3, 4};
    change(c);
    EXPECT_EQ(c.solve(), moecclInvalidArgument) << sentence;
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(sentence), std::string::npos)
        << moecclGetLastError(nullptr);
  };
  refused([](Case& c) { c.p.n_layers = 0; }, "problem.n_layers is 0: between 1 and 65535");
  refused([](Case& c) { c.p.n_slots = 9; },
          "problem.n_slots is 9: give a multiple of n_gpus (4) from n_experts (4) to 65536");
  refused([](Case& c) { c.p.n_experts = 9; }, "problem.n_slots is 8: give a multiple of n_gpus (4) from n_experts (9)");
  refused([](Case& c) { c.p.n_groups = 6; }, "problem.n_groups is 6: between 1 and 4");
  refused([](Case& c) { c.p.n_nodes = -1; }, "problem.n_nodes is -1: between 1 and");
  refused([](Case& c) { c.p.n_groups = 3, c.p.n_nodes = 3; }, "problem.n_groups is 3: give a divisor of n_experts (4)");
  refused([](Case& c) { c.p.n_groups = 4, c.p.n_nodes = 2, c.p.n_gpus = 1; }, "problem.n_nodes is 2: between 1 and 1");
  refused([](Case& c) { c.p.n_gpus = 1, c.p.n_nodes = 1, c.p.n_slots = 1025; }, "problem.n_gpus is 1: ");
  refused([](Case& c) { c.load[2] = std::nan(""); }, "problem.load[0][2] is nan: give a number from 0 to 1e30");
  refused([](Case& c) { c.load[1] = -1; }, "problem.load[0][1] is -1");
  refused([](Case& c) { c.load[3] = INFINITY; }, "problem.load[0][3] is inf");
  refused([](Case& c) { c.current = {0, 1, 2, 3, 0, 1, 2, 4}; },
          "problem.current[0][7] is 4: give an expert from 0 to 3, or -1");
  refused([](Case& c) { c.p.move_cost = -1; }, "problem.move_cost is -1: give 0 to 1e+30");
  refused([](Case& c) { c.p.tolerance = 2; }, "problem.tolerance is 2: give a share from 0 to 1");
  Case c = shaped(1, 4, 8, 2, 2, 4);
  int32_t slots[8];
  EXPECT_EQ(moecclSolveBalance(&c.p, slots, nullptr), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("problem.load is NULL"), std::string::npos);
  c.load = {1, 2, 3, 4};
  c.p.load = c.load.data();
  EXPECT_EQ(moecclSolveBalance(&c.p, slots, nullptr), moecclSuccess);
  EXPECT_EQ(moecclSolveBalance(&c.p, nullptr, nullptr), moecclInvalidArgument);
}

}  // namespace
}  // namespace moeccl::solve
