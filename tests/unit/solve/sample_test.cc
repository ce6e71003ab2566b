// SPDX-License-Identifier: Apache-2.0
#include "src/solve/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "perf/solve/netmoe.h"
#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

struct Problem {
  moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
  std::vector<int32_t> gather, scatter, expert_device, device_node, current;

  void point() {
    p.num_gather = gather.data();
    p.num_scatter = scatter.empty() ? nullptr : scatter.data();
    p.expert_device = expert_device.empty() ? nullptr : expert_device.data();
    p.device_node = device_node.empty() ? nullptr : device_node.data();
    p.current = current.empty() ? nullptr : current.data();
  }
};

struct Solved {
  std::vector<int32_t> placement;
  moecclSampleAnswer_t a{};
};
Solved solve(const Problem& problem) {
  Solved s;
  s.placement.assign(static_cast<size_t>(problem.p.n_samples), -1);
  s.a.size = sizeof(s.a);
  EXPECT_EQ(moecclSolveSamples(&problem.p, s.placement.data(), &s.a, nullptr, 0), moecclSuccess)
      << moecclGetLastError(nullptr);
  return s;
}

Problem random_problem(SplitMix64& random) {
  Problem r;
  r.p.n_devices = 1 + static_cast<int32_t>(random.below(8));
  r.p.n_nodes = 1 + static_cast<int32_t>(random.below(static_cast<uint64_t>(r.p.n_devices)));
  r.p.n_samples = static_cast<int32_t>(random.below(25));
  r.p.n_experts = 1 + static_cast<int32_t>(random.below(20));
  const auto fill = [&](std::vector<int32_t>& v, int64_t n, int32_t bound) {
    for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<int32_t>(random.below(static_cast<uint64_t>(bound))));
  };
  const int64_t counts = int64_t{r.p.n_samples} * r.p.n_experts;
  fill(r.gather, counts, 50);
  if (random.below(2)) fill(r.scatter, std::max<int64_t>(counts, 1), 50);
  if (random.below(2)) fill(r.expert_device, r.p.n_experts, r.p.n_devices);
  if (random.below(2)) fill(r.device_node, r.p.n_devices, r.p.n_nodes);
  if (random.below(2)) fill(r.current, std::max(r.p.n_samples, 1), r.p.n_devices);
  r.p.min_gain = -1;
  r.p.alpha_inter_us = random.unit();
  r.point();
  return r;
}

// Computes Eq. 1 to 5 again, slowly, from only the placement and the counts.
double time_by_definition(const Problem& r, const std::vector<int32_t>& placement, int64_t* inter, int64_t* intra) {
  const moecclSampleProblem_t& p = r.p;
  const double bi = p.beta_inter_us > 0 ? p.beta_inter_us : 0.04096,
               ba = p.beta_inter_us > 0 ? p.beta_intra_us : 0.01024;
  const auto device = [&](int32_t e) {
    return r.expert_device.empty() ? even_group(e, p.n_experts, p.n_devices) : r.expert_device[static_cast<size_t>(e)];
  };
  const auto node = [&](int32_t j) {
    return r.device_node.empty() ? even_group(j, p.n_devices, p.n_nodes) : r.device_node[static_cast<size_t>(j)];
  };
  double sum = 0;
  *inter = *intra = 0;
  for (const auto* num : {&r.gather, &r.scatter}) {
    if (num == &r.scatter && p.num_scatter == nullptr) continue;
    double slowest = 0;
    for (int32_t n = 0; n < p.n_nodes; ++n) {
      int64_t out = 0, in = 0, inside = 0;
      for (int32_t i = 0; i < p.n_samples; ++i)
        for (int32_t e = 0; e < p.n_experts; ++e) {
          const int64_t tokens = (*num)[static_cast<size_t>(i * p.n_experts + e)];
          const int32_t home = placement[static_cast<size_t>(i)];
          if (node(home) == n && node(device(e)) != n) out += tokens;
          if (node(home) != n && node(device(e)) == n) in += tokens;
          if (node(home) == n && node(device(e)) == n && home != device(e)) inside += tokens;
        }
      *inter += out;
      *intra += inside;
      slowest = std::max({slowest, p.alpha_inter_us + bi * static_cast<double>(std::max(out, in)),
                          p.alpha_intra_us + ba * static_cast<double>(inside)});
    }
    sum += slowest;
  }
  return sum;
}

std::vector<int32_t> current_of(const Problem& r) {
  std::vector<int32_t> now(static_cast<size_t>(r.p.n_samples));
  for (int32_t i = 0; i < r.p.n_samples; ++i)
    now[static_cast<size_t>(i)] =
        r.current.empty() ? even_group(i, r.p.n_samples, r.p.n_devices) : r.current[static_cast<size_t>(i)];
  return now;
}

TEST(Sample, IsNeverWorseKeepsEveryDevicesNumberAndReportsTheDefinition) {
  SplitMix64 random(testing::seed() + 11);
  for (int round = 0; round < 500; ++round) {
    const Problem r = random_problem(random);
    const Solved s = solve(r);
    const std::vector<int32_t> now = current_of(r);
    std::vector<int32_t> room(static_cast<size_t>(r.p.n_devices));
    for (const int32_t j : now) ++room[static_cast<size_t>(j)];
    for (const int32_t j : s.placement) ASSERT_GE(--room[static_cast<size_t>(j)], 0);
    int64_t inter, intra;
    ASSERT_NEAR(s.a.before_us, time_by_definition(r, now, &inter, &intra), 1e-9) << "round " << round;
    ASSERT_EQ(s.a.inter_before, inter);
    ASSERT_EQ(s.a.intra_before, intra);
    ASSERT_NEAR(s.a.after_us, time_by_definition(r, s.placement, &inter, &intra), 1e-9) << "round " << round;
    ASSERT_EQ(s.a.inter_after, inter);
    ASSERT_EQ(s.a.intra_after, intra);
    ASSERT_LE(s.a.after_us, s.a.before_us + 1e-9);
    if (!s.a.keep) {
      ASSERT_LE(s.a.after_us, s.a.two_stage_us + 1e-9) << "the refinement made it worse";
    }
  }
}

// Figure 2: I = L = E = 4, K = 1, two nodes of two devices. Each node sends 5 tokens before, and 2 after samples 0 and
// 3 have traded places. The counts follow from these volumes: sample 0 prefers expert 2, sample 3 expert 0.
TEST(Sample, SolvesThePapersExample) {
  Problem r;
  r.p.n_samples = r.p.n_experts = r.p.n_devices = 4;
  r.p.n_nodes = 2;
  r.gather = {0, 1, 3, 0, 1, 1, 1, 1, 1, 0, 1, 2, 3, 1, 0, 0};
  r.p.min_gain = -1;
  r.point();
  const auto sent = [&](const std::vector<int32_t>& placement, int32_t node) {
    int32_t tokens = 0;
    for (size_t i = 0; i < 4; ++i)
      for (size_t e = 0; e < 4; ++e)
        if (placement[i] / 2 == node && static_cast<int32_t>(e / 2) != node) tokens += r.gather[4 * i + e];
    return tokens;
  };
  const Solved s = solve(r);
  EXPECT_EQ(s.a.keep, 0);
  for (const int32_t node : {0, 1}) {
    EXPECT_EQ(sent({0, 1, 2, 3}, node), 5);
    EXPECT_EQ(sent({3, 1, 2, 0}, node), 2) << "Fig. 2(c)";
    EXPECT_EQ(sent(s.placement, node), 2);
  }
  EXPECT_EQ(s.a.inter_before, 10);
  EXPECT_EQ(s.a.inter_after, 4);
  EXPECT_GE(s.placement[0], 2) << "sample 0 belongs to node 1";
  EXPECT_LT(s.placement[3], 2) << "sample 3 belongs to node 0";
}

TEST(Sample, FindsTheLeastInterNodeVolumeOfAllPlacements) {
  SplitMix64 random(testing::seed() + 21);
  for (int round = 0; round < 15; ++round) {
    Problem r;
    r.p.n_samples = 8;
    r.p.n_devices = r.p.n_nodes = 4;
    r.p.n_experts = 8;
    r.p.min_gain = -1;
    r.p.refine_pairs = -1;  // only the exact stages, because the refinement trades volume for balance
    for (int i = 0; i < 64; ++i) r.gather.push_back(static_cast<int32_t>(random.below(30)));
    r.point();
    int64_t least = INT64_MAX;
    std::vector<int32_t> order = {0, 0, 1, 1, 2, 2, 3, 3};
    do {
      int64_t inter, intra;
      time_by_definition(r, order, &inter, &intra);
      least = std::min(least, inter);
    } while (std::next_permutation(order.begin(), order.end()));
    const Solved s = solve(r);
    if (!s.a.keep) {
      ASSERT_EQ(s.a.inter_after, least) << "round " << round;
    }
  }
}

// NetMoE Table 5, all columns at both sizes from one generator (8 devices per node, I/J = 4, E/J = 2, 1024 tokens, K =
// 2): the means of the paper's five models.
TEST(Sample, ReproducesTable5) {
  struct Row {
    int32_t nodes;
    perf::netmoe::Columns paper;
  };
  for (const Row& row : {Row{2, {-0.390, -0.078, 0.440, 0.919}}, Row{4, {-0.372, 0.301, 0.724, 0.963}}}) {
    perf::netmoe::Columns ours;
    ASSERT_TRUE(perf::netmoe::table_5({row.nodes}, {}, 50, 1, &ours));
    EXPECT_NEAR(ours.inter, row.paper.inter, 0.05) << row.nodes << " nodes";
    EXPECT_NEAR(ours.intra, row.paper.intra, 0.05) << row.nodes << " nodes";
    EXPECT_NEAR(ours.across_nodes, row.paper.across_nodes, 0.08) << row.nodes << " nodes";
    EXPECT_NEAR(ours.all, row.paper.all, 0.05) << row.nodes << " nodes";
  }
}

// Three levels: each crossing is counted once, at the outermost level that it crosses, and priced at that level.
TEST(Sample, EveryLevelHasItsPrice) {
  SplitMix64 random(testing::seed() + 71);
  for (int round = 0; round < 50; ++round) {
    Problem r;
    r.p.n_devices = 8, r.p.n_nodes = 2, r.p.n_experts = 16, r.p.n_samples = 24;
    for (int i = 0; i < 24 * 16; ++i) r.gather.push_back(static_cast<int32_t>(random.below(40)));
    const std::vector<int32_t> socket = {0, 0, 1, 1, 2, 2, 3, 3};
    const double alpha = 3 * random.unit(), beta = 0.1 * random.unit();
    r.p.beta_inter_us = 0.2 * random.unit(), r.p.beta_intra_us = 0.05 * random.unit();
    r.p.n_inner = 1, r.p.inner_group = socket.data(), r.p.inner_alpha_us = &alpha, r.p.inner_beta_us = &beta;
    r.p.min_gain = -1;
    r.point();
    const Solved s = solve(r);
    double slowest = 0;
    for (int32_t n = 0; n < 2; ++n) {
      int64_t out = 0, in = 0, across = 0, inside = 0;
      for (int32_t i = 0; i < 24; ++i)
        for (int32_t e = 0; e < 16; ++e) {
          const int64_t tokens = r.gather[static_cast<size_t>(i * 16 + e)];
          const int32_t home = s.placement[static_cast<size_t>(i)], owner = e / 2;
          if (home / 4 == n && owner / 4 != n) out += tokens;
          if (home / 4 != n && owner / 4 == n) in += tokens;
          if (home / 4 != n || owner / 4 != n) continue;
          if (home / 2 != owner / 2) across += tokens;
          if (home / 2 == owner / 2 && home != owner) inside += tokens;
        }
      slowest = std::max({slowest, r.p.beta_inter_us * static_cast<double>(std::max(out, in)),
                          alpha + beta * static_cast<double>(across), r.p.beta_intra_us * static_cast<double>(inside)});
    }
    ASSERT_NEAR(s.a.after_us, slowest, 1e-9) << "round " << round;
    ASSERT_LE(s.a.after_us, s.a.before_us + 1e-9);
  }
  Problem torn;
  torn.p.n_devices = torn.p.n_experts = 4, torn.p.n_nodes = 2, torn.p.n_samples = 1;
  torn.gather.assign(4, 1);
  const std::vector<int32_t> group = {0, 1, 1, 2};
  const double zero = 0;
  torn.p.n_inner = 1, torn.p.inner_group = group.data(), torn.p.inner_alpha_us = torn.p.inner_beta_us = &zero;
  torn.point();
  int32_t placement = 0;
  EXPECT_EQ(moecclSolveSamples(&torn.p, &placement, nullptr, nullptr, 0), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("group 1 of level 0"), std::string::npos);
}

TEST(Sample, KeepsTheIdentityWithoutLocality) {
  SplitMix64 random(testing::seed() + 41);
  for (const int32_t nodes : {2, 4}) {
    Problem r;
    r.p.n_nodes = nodes;
    r.p.n_devices = 8 * nodes;
    r.p.n_experts = 2 * r.p.n_devices;
    r.p.n_samples = 4 * r.p.n_devices;
    r.gather = testing::local_routing(random, {r.p.n_samples, r.p.n_experts, r.p.n_devices, 2048, 0});
    r.point();
    const Solved s = solve(r);
    EXPECT_EQ(s.a.keep, 1) << "gain " << s.a.gain;
    EXPECT_EQ(s.a.moved, 0);
    EXPECT_EQ(s.placement, current_of(r));
  }
}

TEST(Sample, EvaluatesAPlacementAndRefusesAnImpossibleOne) {
  SplitMix64 random(testing::seed() + 51);
  Problem r = random_problem(random);
  while (r.p.n_samples < 4 || r.p.n_devices < 2) r = random_problem(random);
  r.point();
  const Solved s = solve(r);
  moecclSampleAnswer_t a{};
  a.size = sizeof(a);
  ASSERT_EQ(moecclEvaluateSamples(&r.p, s.placement.data(), &a), moecclSuccess);
  EXPECT_DOUBLE_EQ(a.after_us, s.a.after_us);
  std::vector<int32_t> crowded(s.placement.size(), r.p.n_devices);
  EXPECT_EQ(moecclEvaluateSamples(&r.p, crowded.data(), &a), moecclInvalidArgument);
}

TEST(Sample, NamesBadArguments) {
  SplitMix64 random(2);
  Problem good = random_problem(random);
  while (good.p.n_samples < 2) good = random_problem(random);
  std::vector<int32_t> placement(30);
  const auto says = [&](Problem r, const char* word) {
    EXPECT_EQ(moecclSolveSamples(&r.p, placement.data(), nullptr, nullptr, 0), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
  };
  Problem r = good;
  r.point();
  r.gather[3] = -1;
  says(r, "num_gather");
  r = good;
  r.point();
  r.gather[0] = r.gather[1] = INT32_MAX;
  says(r, "tokens");
  r = good;
  r.point();
  r.p.n_nodes = r.p.n_devices + 1;
  says(r, "n_nodes");
  r = good;
  r.point();
  r.p.alpha_inter_us = std::numeric_limits<double>::quiet_NaN();
  says(r, "alpha_inter_us");
  r = good;
  r.point();
  r.p.size = 3;
  says(r, "size");
  EXPECT_EQ(moecclSolveSamples(nullptr, placement.data(), nullptr, nullptr, 0), moecclInvalidArgument);
}

}  // namespace
}  // namespace moeccl::solve
