// SPDX-License-Identifier: Apache-2.0
#include "src/solve/swap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

struct Problem {
  moecclSwapProblem_t p = MOECCL_SWAP_PROBLEM_INIT;
  std::vector<int32_t> groups, group_of_slot, placement, topk;
  int64_t n_tokens = 0;
  void point() {
    p.n_groups = groups.data();
    p.group_of_slot = group_of_slot.empty() ? nullptr : group_of_slot.data();
    p.placement = placement.empty() ? nullptr : placement.data();
  }
  int32_t group(int32_t level, int32_t expert) const {
    const int32_t s = placement.empty() ? expert : placement[static_cast<size_t>(expert)];
    return group_of_slot.empty() ? s * groups[static_cast<size_t>(level)] / p.n_experts
                                 : group_of_slot[static_cast<size_t>(level * p.n_experts + s)];
  }
  std::vector<int32_t> count() const {
    size_t n = 0;
    EXPECT_EQ(moecclSwapCountsLength(&p, &n), moecclSuccess);
    std::vector<int32_t> counts(n, -1);
    EXPECT_EQ(moecclSwapCount(&p, topk.data(), n_tokens, counts.data(), nullptr, 0), moecclSuccess)
        << moecclGetLastError(nullptr);
    return counts;
  }
};

Problem random_problem(SplitMix64& random, int32_t experts, int64_t tokens) {
  Problem r;
  r.p.n_experts = experts;
  r.p.top_k = 1 + static_cast<int32_t>(random.below(static_cast<uint64_t>(std::min(6, experts))));
  r.groups = {2, 4, 8};
  r.groups.resize(1 + random.below(3));
  r.p.n_levels = static_cast<int32_t>(r.groups.size());
  if (random.below(2)) {  // uneven groups that still refine each other
    for (int32_t s = 0; s < experts; ++s) r.group_of_slot.push_back(0);
    for (size_t d = 1; d <= r.groups.size(); ++d)
      for (int32_t s = 0; s < experts; ++s) {
        const int32_t up =
            d == 1 ? 0 : r.group_of_slot[(d - 1) * static_cast<size_t>(experts) + static_cast<size_t>(s)];
        r.group_of_slot.push_back(2 * up + static_cast<int32_t>(random.below(2)));
      }
    r.group_of_slot.erase(r.group_of_slot.begin(), r.group_of_slot.begin() + experts);
  }
  if (random.below(2)) {
    r.placement.resize(static_cast<size_t>(experts));
    std::iota(r.placement.begin(), r.placement.end(), 0);
    for (size_t i = r.placement.size(); i > 1; --i) std::swap(r.placement[i - 1], r.placement[random.below(i)]);
  }
  r.n_tokens = tokens;
  r.topk = testing::random_topk(random, tokens, r.p.top_k, experts);
  for (int32_t& e : r.topk)
    if (random.below(20) == 0) e = -1;
  r.point();
  return r;
}

// Computes Eq. 7 for every group, from nothing but the tokens.
std::vector<double> full_by_definition(const Problem& r, int32_t level) {
  std::vector<double> z(static_cast<size_t>(r.groups[static_cast<size_t>(level)]));
  for (int64_t t = 0; t < r.n_tokens; ++t) {
    std::vector<bool> reached(z.size());
    for (int32_t j = 0; j < r.p.top_k; ++j) {
      const int32_t e = r.topk[static_cast<size_t>(t * r.p.top_k + j)];
      if (e >= 0) reached[static_cast<size_t>(r.group(level, e))] = true;
    }
    for (size_t g = 0; g < z.size(); ++g) z[g] += reached[g];
  }
  return z;
}

Problem swapped(Problem r, int32_t a, int32_t b) {
  if (r.placement.empty()) {
    r.placement.resize(static_cast<size_t>(r.p.n_experts));
    std::iota(r.placement.begin(), r.placement.end(), 0);
  }
  std::swap(r.placement[static_cast<size_t>(a)], r.placement[static_cast<size_t>(b)]);
  r.point();
  return r;
}

TEST(Swap, TableEqualsCountingAfterEverySwap) {
  SplitMix64 random(testing::seed());
  for (int round = 0; round < 60; ++round) {
    Problem r =
        random_problem(random, 8 + static_cast<int32_t>(random.below(9)), static_cast<int64_t>(random.below(60)));
    r.point();
    const std::vector<int32_t> counts = r.count();
    const auto n = static_cast<size_t>(r.p.n_experts);
    for (int32_t level = 0; level < r.p.n_levels; ++level) {
      const auto groups = static_cast<size_t>(r.groups[static_cast<size_t>(level)]);
      std::vector<int32_t> z(n * n * groups, -1);
      ASSERT_EQ(moecclSwapTable(&r.p, counts.data(), level, z.data()), moecclSuccess) << moecclGetLastError(nullptr);
      for (int32_t a = 0; a < r.p.n_experts; ++a)
        for (int32_t b = 0; b < r.p.n_experts; ++b) {
          const std::vector<double> want = full_by_definition(swapped(r, a, b), level);
          for (size_t g = 0; g < groups; ++g)
            ASSERT_EQ(z[(static_cast<size_t>(a) * n + static_cast<size_t>(b)) * groups + g], want[g])
                << "round " << round << " level " << level << " swap " << a << "," << b << " group " << g;
        }
    }
  }
}

TEST(Swap, CountsOfRanksAddUp) {
  SplitMix64 random(testing::seed() + 1);
  Problem r = random_problem(random, 24, 300);
  r.point();
  const std::vector<int32_t> all = r.count();
  std::vector<int32_t> sum(all.size());
  for (int rank = 0; rank < 3; ++rank) {
    Problem part = r;
    part.point();
    part.n_tokens = 100;
    part.topk.assign(r.topk.begin() + rank * 100 * r.p.top_k, r.topk.begin() + (rank + 1) * 100 * r.p.top_k);
    const std::vector<int32_t> counts = part.count();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += counts[i];
  }
  EXPECT_EQ(sum, all);
}

// Computes Eq. 8 with Eq. 9 and 11 for the flat AlltoAll and one link, from the definition: each GPU has 1/G of the
// tokens.
double time_by_definition(const Problem& r, double alpha, double beta) {
  const std::vector<double> z = full_by_definition(r, r.p.n_levels - 1);
  double largest = *std::max_element(z.begin(), z.end()), value = largest;
  if (r.p.max_function == moecclMaxSmooth && largest > 0) {
    double sum = 0;
    for (const double x : z) sum += std::pow(x / largest, 10);
    value = largest * std::pow(sum, 0.1);
  } else if (r.p.max_function == moecclMaxLogSumExp) {
    double sum = 0;
    for (const double x : z) sum += std::exp(x - largest);
    value = largest + std::log(sum);
  }
  const auto gpus = static_cast<double>(z.size());
  return alpha + beta * gpus * 14336 * (value / gpus);
}

TEST(Swap, TheBestPairIsTheBestOfAll) {
  SplitMix64 random(testing::seed() + 2);
  int taken = 0;
  for (int round = 0; round < 60; ++round) {
    Problem r =
        random_problem(random, 8 + static_cast<int32_t>(random.below(5)), 1 + static_cast<int64_t>(random.below(60)));
    r.point();
    const double alpha[8] = {3, 3, 3, 3, 3, 3, 3, 3}, beta[8] = {1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4};
    r.p.inter_alpha_us = r.p.intra_alpha_us = alpha;
    r.p.inter_beta_us = r.p.intra_beta_us = beta;
    r.p.dimension = 1;
    r.p.max_function = static_cast<moecclMaxFunction_t>(round % 3);
    double best = time_by_definition(r, 3, 1e-4);
    const double before = best;
    for (int32_t a = 0; a < r.p.n_experts; ++a)
      for (int32_t b = a + 1; b < r.p.n_experts; ++b)
        best = std::min(best, time_by_definition(swapped(r, a, b), 3, 1e-4));
    int32_t pair[2] = {-5, -5};
    moecclSwapAnswer_t answer{};
    answer.size = sizeof(answer);
    const std::vector<int32_t> counts = r.count();
    ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &answer, nullptr, 0), moecclSuccess)
        << moecclGetLastError(nullptr);
    ASSERT_NEAR(answer.before_us, before, before * 1e-9) << "round " << round;
    ASSERT_NEAR(answer.after_us, best, best * 1e-9) << "round " << round;
    if (answer.keep) {
      ASSERT_EQ(pair[0], -1);
    } else {
      ++taken;
      const Problem after = swapped(r, pair[0], pair[1]);
      ASSERT_NEAR(time_by_definition(after, 3, 1e-4), best, best * 1e-9);
      const std::vector<double> z = full_by_definition(after, r.p.n_levels - 1);
      ASSERT_EQ(answer.max_load_after, *std::max_element(z.begin(), z.end()));
    }
  }
  EXPECT_GT(taken, 20);
}

// Thousands of tokens and one hot group: exp(after - before) of every group is 0.
TEST(Swap, LogSumExpHoldsWhenEveryGroupEndsFarBelowTheFullest) {
  SplitMix64 random(testing::seed() + 11);
  constexpr int32_t kExperts = 16;
  Problem r;
  r.p.n_experts = kExperts;
  r.p.top_k = 1;
  r.p.n_levels = 1;
  r.p.max_function = moecclMaxLogSumExp;
  r.groups = {4};
  r.n_tokens = 8000;
  for (int64_t t = 0; t < r.n_tokens; ++t)
    r.topk.push_back(static_cast<int32_t>(random.below(random.below(10) < 7 ? 4 : kExperts)));
  r.point();
  int32_t pair[2] = {-5, -5};
  moecclSwapAnswer_t answer{};
  answer.size = sizeof(answer);
  const std::vector<int32_t> counts = r.count();
  ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &answer, nullptr, 0), moecclSuccess);
  ASSERT_FALSE(answer.keep);
  const auto fullest_after = [&](int32_t a, int32_t b) {
    const std::vector<double> z = full_by_definition(swapped(r, a, b), 0);
    return *std::max_element(z.begin(), z.end());
  };
  double least = 1e300;
  for (int32_t a = 0; a < kExperts; ++a)
    for (int32_t b = a + 1; b < kExperts; ++b) least = std::min(least, fullest_after(a, b));
  EXPECT_NEAR(fullest_after(pair[0], pair[1]), least, 2) << "log-sum-exp is the maximum to within log(groups)";
  Problem after = swapped(r, pair[0], pair[1]);
  moecclSwapAnswer_t next{};
  next.size = sizeof(next);
  const std::vector<int32_t> recounted = after.count();
  ASSERT_EQ(moecclSolveSwap(&after.p, recounted.data(), pair, &next, nullptr, 0), moecclSuccess);
  EXPECT_NEAR(answer.after_us, next.before_us, next.before_us * 1e-9) << "the predicted time is that of the swap";
}

// With one expert on each GPU a swap changes nothing but the order in which loads are added.
TEST(Swap, NothingIsSwappedForTheLastDigits) {
  SplitMix64 random(testing::seed() + 12);
  for (int round = 0; round < 100; ++round) {
    Problem r;
    r.p.n_experts = 8 * (1 + static_cast<int32_t>(random.below(4)));
    r.p.top_k = 2;
    r.p.n_levels = 1;
    r.groups = {r.p.n_experts};
    r.n_tokens = 50 + static_cast<int64_t>(random.below(2000));
    r.topk = testing::random_topk(random, r.n_tokens, r.p.top_k, r.p.n_experts);
    r.point();
    int32_t pair[2] = {-5, -5};
    moecclSwapAnswer_t answer{};
    answer.size = sizeof(answer);
    const std::vector<int32_t> counts = r.count();
    ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &answer, nullptr, 0), moecclSuccess);
    ASSERT_TRUE(answer.keep) << "round " << round << " gains " << answer.gain;
    ASSERT_EQ(answer.gain, 0);
  }
}

TEST(Swap, ChoosesTheDimensionOfEq6AndPricesMigration) {
  SplitMix64 random(testing::seed() + 3);
  Problem r;
  r.p.n_experts = 64;
  r.p.top_k = 8;
  r.groups = {4, 8, 16, 32};
  r.p.n_levels = 4;
  r.n_tokens = 2000;
  r.topk = testing::random_topk(random, 2000, 8, 64);
  r.p.max_function = moecclMaxPlain;  // that of Eq. 6
  r.p.row_bytes = 1e6;                // more than start-up times hide
  r.point();
  const std::vector<int32_t> counts = r.count();
  moecclSwapAnswer_t chosen{}, fixed{};
  chosen.size = fixed.size = sizeof(chosen);
  int32_t pair[2];
  ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &chosen, nullptr, 0), moecclSuccess);
  double least = INFINITY;
  for (r.p.dimension = 1; r.p.dimension <= 4; ++r.p.dimension) {
    ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &fixed, nullptr, 0), moecclSuccess);
    least = std::min(least, fixed.before_us);
    if (r.p.dimension == chosen.dimension) {
      EXPECT_EQ(fixed.before_us, chosen.before_us);
    }
  }
  EXPECT_EQ(chosen.before_us, least);
  r.p.dimension = 0;
  r.p.max_function = moecclMaxSmooth;
  const int32_t by_max = chosen.dimension;
  ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &chosen, nullptr, 0), moecclSuccess);
  EXPECT_EQ(chosen.dimension, by_max) << "Eq. 9's maximum must not move Eq. 6's choice";
  ASSERT_EQ(chosen.keep, 0);
  r.p.migrate_us = 2 * (chosen.before_us - chosen.after_us);
  ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &fixed, nullptr, 0), moecclSuccess);
  EXPECT_EQ(fixed.keep, 1) << "one iteration does not pay for it";
  r.p.horizon = 3;
  ASSERT_EQ(moecclSolveSwap(&r.p, counts.data(), pair, &fixed, nullptr, 0), moecclSuccess);
  EXPECT_EQ(fixed.keep, 0) << "three do";
}

TEST(Swap, ASequenceGainsStepByStepAndDedupBeatsCountingDuplicates) {
  // Clustered: tokens choose from one of 16 clusters of experts, which are scattered over the GPUs. Popularity is zipf.
  SplitMix64 random(testing::seed() + 4);
  Problem r;
  r.p.n_experts = 64;
  r.p.top_k = 4;
  r.groups = {2, 4, 8, 16};
  r.p.n_levels = 4;
  r.n_tokens = 3000;
  for (int64_t t = 0; t < r.n_tokens; ++t) {
    const auto cluster = static_cast<int32_t>(16 * random.unit() * random.unit());
    for (int32_t j = 0; j < 4; ++j) r.topk.push_back((cluster + 16 * j) % 64);
  }
  r.point();
  double last = INFINITY;
  for (const int32_t swaps : {0, 1, 8, 64}) {
    std::vector<int32_t> pairs(static_cast<size_t>(2 * swaps)), placement(64);
    moecclSwapAnswer_t a{};
    a.size = sizeof(a);
    ASSERT_EQ(moecclSolveSwapSequence(&r.p, r.topk.data(), r.n_tokens, swaps, pairs.data(), placement.data(), &a),
              moecclSuccess);
    EXPECT_LE(a.after_us, last);
    last = a.after_us;
    std::vector<int32_t> order = placement;
    std::sort(order.begin(), order.end());
    for (int32_t s = 0; s < 64; ++s) ASSERT_EQ(order[static_cast<size_t>(s)], s);
    Problem after = r;
    after.placement = placement;
    after.point();
    const std::vector<double> z = full_by_definition(after, 3);
    EXPECT_EQ(a.max_load_after, *std::max_element(z.begin(), z.end()));
  }
  // SmartMoE's method, judged by the traffic that is really sent.
  Problem smart = r;
  smart.point();
  smart.p.count_duplicates = 1;
  std::vector<int32_t> pairs(128), placement(64);
  ASSERT_EQ(moecclSolveSwapSequence(&smart.p, r.topk.data(), r.n_tokens, 64, pairs.data(), placement.data(), nullptr),
            moecclSuccess);
  smart.p.count_duplicates = 0;
  smart.placement = placement;
  smart.point();
  moecclSwapAnswer_t judged{};
  judged.size = sizeof(judged);
  const std::vector<int32_t> counts = smart.count();
  int32_t pair[2];
  ASSERT_EQ(moecclSolveSwap(&smart.p, counts.data(), pair, &judged, nullptr, 0), moecclSuccess);
  EXPECT_GT(judged.before_us, last) << "counting duplicates should be worse";
}

TEST(Swap, NamesBadArguments) {
  SplitMix64 random(2);
  Problem r = random_problem(random, 12, 20);
  r.group_of_slot.clear();
  r.placement.clear();
  r.point();
  std::vector<int32_t> counts = r.count();
  const auto says = [&](const char* word) {
    EXPECT_EQ(moecclSwapCount(&r.p, r.topk.data(), r.n_tokens, counts.data(), nullptr, 0), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
  };
  const std::vector<int32_t> groups = r.groups;
  r.groups[0] = 13;
  says("n_groups[0] is 13");
  r.groups = groups;
  r.topk[0] = 12;
  says("topk[0][0] is 12");
  r.topk[0] = 0;
  r.p.gamma = std::nan("");
  says("gamma");
  r.p.gamma = 0;
  r.placement.assign(12, 3);
  r.point();
  says("placement[1] is 3");
  r.placement.clear();
  r.groups = {2, 3};
  r.p.n_levels = 2;
  r.point();
  says("refine");
}

}  // namespace
}  // namespace moeccl::solve
