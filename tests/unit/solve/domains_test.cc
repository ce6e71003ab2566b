// SPDX-License-Identifier: Apache-2.0
#include "src/solve/domains.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/unit/solve/random_problems.h"

namespace moeccl::solve {
namespace {

constexpr double kGbps = 1e9 / 8;

struct Problem {
  moecclDomainProblem_t p = MOECCL_DOMAIN_PROBLEM_INIT;
  std::vector<int32_t> scale, sizes;
  std::vector<double> bandwidth;
  void point() {
    p.scale = scale.empty() ? nullptr : scale.data();
    p.sizes = sizes.empty() ? nullptr : sizes.data();
    p.bandwidth = bandwidth.data();
    p.n_levels = static_cast<int32_t>(bandwidth.size());
  }
};

double proportion(double lat, double d, double pe) {
  double p = -1;
  EXPECT_EQ(moecclDomainProportion(8, 128 * kGbps, lat, d, pe, &p, nullptr), moecclSuccess)
      << moecclGetLastError(nullptr);
  return p;
}

// HybridEP Table IV, Eq. 11 and 12. The AllGather rows result as printed. The Mix rows are printed with a pre-expert
// latency of 0.049 ms, which gives 0.98 and 0.95; the printed optima 0.75 and 0.5 (the nearest candidates) belong to
// 0.49 ms.
TEST(Domains, TableIVOptima) {
  EXPECT_EQ(proportion(0.099e-3, 3e6, 0.094e6), 0);
  EXPECT_EQ(proportion(0.099e-3, 3e6, 0.047e6), 0);
  EXPECT_NEAR(proportion(0.49e-3, 8e6, 4.7e6), 0.76, 0.005);
  EXPECT_NEAR(proportion(0.49e-3, 8e6, 2.35e6), 0.52, 0.005);
  EXPECT_NEAR(proportion(0.049e-3, 8e6, 4.7e6), 0.98, 0.005);
  EXPECT_NEAR(proportion(0.049e-3, 8e6, 2.35e6), 0.95, 0.005);
}

TEST(Domains, ClosedFormIsTheLeastOfEq10) {
  SplitMix64 random(testing::seed());
  for (int round = 0; round < 500; ++round) {
    const OneLevel v{2 + static_cast<double>(random.below(60)), 1e9 * (1 + random.unit() * 50), 1e-3 * random.unit(),
                     1e7 * random.unit(), 1e6 * random.unit()};
    const double best = latency(v, best_proportion(v));
    for (int k = 0; k <= 1000; ++k)
      ASSERT_LE(best, latency(v, k / 1000.0) * (1 + 1e-12)) << "round " << round << " p " << k;
  }
}

// HybridEP Table VII: communications of a step by EP size and domain size, counted from Algorithm 1.
TEST(Domains, TableVIIFrequencies) {
  const struct {
    int32_t gpus;
    std::vector<int> all_to_all, all_gather;
  } table[] = {{8, {56, 24, 8, 0}, {0, 8, 24, 56}},
               {16, {240, 112, 48, 16, 0}, {0, 16, 48, 112, 240}},
               {32, {992, 480, 224, 96, 32, 0}, {0, 32, 96, 224, 480, 992}}};
  for (const auto& row : table) {
    Problem r;
    r.scale = {row.gpus};
    r.bandwidth = {1e9};
    r.point();
    for (size_t k = 0; k < row.all_to_all.size(); ++k) {
      const int32_t domain = 1 << k;
      int seen[3] = {0, 0, 0};
      for (int32_t m = 0; m < row.gpus; ++m)
        for (int32_t n = 0; n < row.gpus; ++n) {
          moecclDomainLink_t link = moecclLinkNone;
          ASSERT_EQ(moecclDomainLink(&r.p, &domain, 0, m, n, &link), moecclSuccess);
          ++seen[link];
        }
      EXPECT_EQ(seen[moecclLinkAllToAll], row.all_to_all[k]) << row.gpus << " GPUs, domain " << domain;
      EXPECT_EQ(seen[moecclLinkAllGather], row.all_gather[k]) << row.gpus << " GPUs, domain " << domain;
    }
  }
}

// Workers 0 to 4 make the domains {0, 1}, {2, 3} and {4}: 1 and 3 have their counterpart in the smaller one too.
TEST(Domains, WorkersMeetTheirCounterpartsInSmallerDomains) {
  const int32_t domain[] = {1, 2}, sizes[] = {2, 3, 5};
  const double bandwidth[] = {1e9, 1e9};
  Problem r;
  r.scale = {2, 5};
  r.bandwidth = {1e9, 1e9};
  r.point();
  const auto link = [&](int64_t m, int64_t n) {
    moecclDomainLink_t found = moecclLinkNone;
    EXPECT_EQ(moecclDomainLink(&r.p, domain, 1, m, n, &found), moecclSuccess) << moecclGetLastError(nullptr);
    return found;
  };
  const auto all = [&](int64_t first) {
    for (const auto& [m, n] : {std::pair{1, 4}, {3, 4}, {0, 4}, {2, 4}, {0, 2}, {1, 3}}) {
      EXPECT_EQ(link(first + m, first + n), moecclLinkAllToAll) << m << " and " << n;
      EXPECT_EQ(link(first + n, first + m), moecclLinkAllToAll) << n << " and " << m;
    }
    EXPECT_EQ(link(first, first + 3), moecclLinkNone);
    EXPECT_EQ(link(first + 4, first + 4), moecclLinkNone);
    EXPECT_EQ(link(first, first + 1), moecclLinkAllGather);
  };
  all(5);  // of the second worker of the level above
  r.p.sizes = sizes;
  r.p.bandwidth = bandwidth;
  all(3);
  EXPECT_EQ(link(1, 2), moecclLinkAllToAll);  // of the first one, which has 3
}

// Eq. 13 on Figure 8's 4 data centres of 4 GPUs, and its uneven form.
TEST(Domains, Renumbering) {
  Problem even;
  even.scale = {4, 2, 3};
  even.bandwidth = {1, 1, 1};
  even.point();
  int32_t x[3];
  for (int64_t m = 0; m < 24; ++m) {
    ASSERT_EQ(moecclDomainLocate(&even.p, m, x), moecclSuccess);
    EXPECT_EQ(x[0], m / 6 % 4);
    EXPECT_EQ(x[1], m / 3 % 2);
    EXPECT_EQ(x[2], m % 3);
  }
  Problem uneven;
  uneven.sizes = {2, 7, 8};  // two nodes, of 7 and of 8 ranks
  uneven.bandwidth = {1, 1};
  uneven.point();
  for (int64_t m = 0; m < 15; ++m) {
    ASSERT_EQ(moecclDomainLocate(&uneven.p, m, x), moecclSuccess);
    EXPECT_EQ(x[0], m < 7 ? 0 : 1);
    EXPECT_EQ(x[1], m < 7 ? m : m - 7);
  }
  EXPECT_EQ(moecclDomainLocate(&uneven.p, 15, x), moecclInvalidArgument);
}

TEST(Domains, TheAnswerIsTheLeastOfAllSizes) {
  SplitMix64 random(testing::seed() + 1);
  for (int round = 0; round < 200; ++round) {
    Problem r;
    r.scale = {static_cast<int32_t>(1 + random.below(12)), static_cast<int32_t>(1 + random.below(8))};
    r.bandwidth = {1e9 * (0.5 + random.unit()), 1e10};
    r.point();
    r.p.data_bytes = 5e7 * random.unit();
    r.p.expert_bytes = 2e7 * random.unit();
    r.p.pre_expert_s = 1e-2 * random.unit();
    r.p.compression = random.below(2) ? 50 : 0;
    int32_t domain[2];
    moecclDomainAnswer_t a{};
    a.size = sizeof(a);
    ASSERT_EQ(moecclSolveDomains(&r.p, domain, &a), moecclSuccess) << moecclGetLastError(nullptr);
    double least = INFINITY, s = 0;
    for (int32_t x = 1; x <= r.scale[0]; ++x)
      for (int32_t y = 1; y <= r.scale[1]; ++y) {
        if (r.scale[0] % x != 0 || r.scale[1] % y != 0) continue;
        const int32_t candidate[2] = {x, y};
        ASSERT_EQ(moecclDomainLatency(&r.p, candidate, &s), moecclSuccess);
        least = std::min(least, s);
      }
    ASSERT_NEAR(a.after_us, least * 1e6, least * 1e6 * 1e-9);
    const double gathered = 5e-7 + a.all_gather_us;
    ASSERT_LE(a.after_us, a.before_us * (1 + 1e-12));
    ASSERT_GT(gathered, 0);
  }
}

// One level: Eq. 10 with p of Definition 1. A stronger compression never makes it slower.
TEST(Domains, LatencyIsEq10AndCompressionHelps) {
  Problem r;
  r.scale = {8};
  r.bandwidth = {128 * kGbps};
  r.point();
  r.p.data_bytes = 8e6;
  r.p.expert_bytes = 4.7e6;
  r.p.pre_expert_s = 0.49e-3;
  const OneLevel v{8, 128 * kGbps, 0.49e-3, 8e6, 4.7e6};
  for (const int32_t s : {1, 2, 4, 8}) {
    double seconds = 0;
    ASSERT_EQ(moecclDomainLatency(&r.p, &s, &seconds), moecclSuccess);
    EXPECT_NEAR(seconds, latency(v, 1 - (s - 1) / 7.0), 1e-12) << "domain " << s;
  }
  double last = INFINITY;
  for (const double ratio : {1.0, 2.0, 10.0, 50.0}) {
    int32_t domain = 0;
    moecclDomainAnswer_t a{};
    a.size = sizeof(a);
    r.p.compression = ratio;
    ASSERT_EQ(moecclSolveDomains(&r.p, &domain, &a), moecclSuccess);
    EXPECT_LE(a.after_us, last);
    last = a.after_us;
  }
}

// HybridEP Fig. 17 at 1000 data centres. The paper does not print the configuration. This one is chosen so that the
// model covers the reported range, with the paper's expert of 0.36 MB and compression of 50: 111 ms before the experts,
// 1 to 25.6 Gbps, 24 MB with domains of 400 (a), 77 MB with p = 0.2 (b). perf/bench_fig17 draws it.
TEST(Domains, Figure17At1000DataCentres) {
  const auto speedup = [](double gbps, double data, double p) {
    const OneLevel v{1000, gbps * kGbps, 0.111, data, 0.36e6 / 50};
    return latency(v, 1) / latency(v, p);
  };
  const double fixed_size = 1 - 399.0 / 999;
  EXPECT_NEAR(speedup(25.6, 24e6, fixed_size), 1.05, 0.01);
  EXPECT_NEAR(speedup(1, 24e6, fixed_size), 1.45, 0.01);
  EXPECT_NEAR(speedup(25.6, 77e6, 0.2), 1.31, 0.02);
  EXPECT_NEAR(speedup(1, 77e6, 0.2), 3.76, 0.03);
}

TEST(Domains, NamesBadArguments) {
  Problem r;
  r.scale = {4, 0};
  r.bandwidth = {1e9, 1e9};
  r.point();
  int32_t domain[2];
  const auto says = [&](const char* word) {
    EXPECT_EQ(moecclSolveDomains(&r.p, domain, nullptr), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
  };
  says("scale");
  r.scale = {1 << 20, 1 << 20};
  r.point();
  says("more than");
  r.scale = {4, 4};
  r.bandwidth[1] = 0;
  r.point();
  says("bandwidth[1]");
  r.bandwidth[1] = 1;
  r.p.data_bytes = std::nan("");
  says("data_bytes");
}

}  // namespace
}  // namespace moeccl::solve
