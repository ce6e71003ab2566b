// SPDX-License-Identifier: Apache-2.0
#include "src/select/plan_price.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "src/plan/cost.h"
#include "tests/support/timing.h"
#include "topology/synthetic.h"

namespace moeccl::comm {
namespace {

constexpr moecclOp_t kOps[] = {moecclOpAllReduce, moecclOpAllGather, moecclOpReduceScatter, moecclOpAllToAll,
                               moecclOpBroadcast, moecclOpReduce,    moecclOpGather,        moecclOpScatter};

plan::LevelTree tree_of(const std::string& text) {
  Result<plan::LevelTree> tree = topology::parse_synthetic(text, 0);
  EXPECT_TRUE(tree.ok()) << tree.status().message();
  return *tree;
}

struct World {
  const char* topology;
  bool one_host;
  uint32_t most_ranks = 32;
};
constexpr World kWorlds[] = {
    {"node:32(bw=25GB/s,lat=5us) gpu:4(bw=300GB/s,lat=1us)", false},
    {"node:32(bw=1GB/s,lat=30us) gpu:2(bw=20GB/s,lat=2us)", false},
    {"rail:2(bw=10GB/s,lat=10us) node:16(bw=10GB/s,lat=5us) gpu:2", false},
    {"host:2(bw=1GB/s,lat=50us) rank:32", false},
    {"node:8(bw=25GB/s,lat=5us) numa:4(bw=100GB/s,lat=2us) gpu:4(bw=300GB/s,lat=1us)", false, 12},
    {"rank:64", true}};

// For each operation and size, computes how much longer the plan takes that extrapolated prices choose, by the clock of
// all ranks.
TEST(PlanPrice, OfALargeWorldChoosesAsTheWholeClockDoes) {
  double log_sum = 0, worst = 1, log_error = 0;
  int n = 0, n_prices = 0;
  std::string worst_of;
  for (const World& w : kWorlds) {
    const plan::LevelTree tree = tree_of(w.topology);
    plan::Profile profile;
    profile.cores = 8;
    profile.host_level = w.one_host ? -1 : static_cast<int>(tree.depth()) - 2;
    for (const moecclOp_t op : kOps) {
      for (const uint64_t count : {uint64_t{16}, uint64_t{16} << 10, uint64_t{1} << 20}) {
        plan::Shape shape;
        shape.op = op;
        shape.n_ranks = tree.n_ranks;
        shape.count = count;
        shape.element_bytes = 4;
        shape.reach = {w.one_host, w.one_host, w.one_host};
        double least = 0, chosen_ns = 0, chosen_price = 0;
        for (const algo::Algorithm& a : algo::algorithms()) {
          if (a.op != op || !a.applies(shape, tree).ok()) continue;
          const double whole = plan::price(algo::build_all(a, shape, tree), tree, profile).total_ns;
          const double drawn_on = plan_price_ns(a, shape, tree, profile, w.most_ranks);
          log_error += std::abs(std::log(drawn_on / whole));
          ++n_prices;
          if (least == 0 || whole < least) least = whole;
          if (chosen_price == 0 || drawn_on < chosen_price) {
            chosen_price = drawn_on;
            chosen_ns = whole;
          }
        }
        ASSERT_GT(least, 0) << w.topology << " op " << op;
        const double regret = chosen_ns / least;
        log_sum += std::log(regret);
        ++n;
        if (regret > worst) {
          worst = regret;
          worst_of = std::string(w.topology) + ", op " + std::to_string(op) + ", count " + std::to_string(count);
        }
      }
    }
  }
  std::printf("%d choices, regret %.3f, worst %.3f (%s); %d prices, off by %.1f %%\n", n, std::exp(log_sum / n), worst,
              worst_of.c_str(), n_prices, 100 * (std::exp(log_error / n_prices) - 1));
  EXPECT_LT(std::exp(log_sum / n), 1.05);
  EXPECT_LT(worst, 1.35);
}

TEST(PlanPrice, OfASmallWorldIsTheClocks) {
  const plan::LevelTree tree = tree_of("node:4(bw=25GB/s,lat=5us) gpu:8(bw=300GB/s,lat=1us)");
  plan::Shape shape;
  shape.op = moecclOpAllToAll;
  shape.n_ranks = tree.n_ranks;
  shape.count = 4096;
  const algo::Algorithm& flat = *algo::find(shape.op, "flat");
  EXPECT_EQ(plan_price_ns(flat, shape, tree, {}), plan::price(algo::build_all(flat, shape, tree), tree, {}).total_ns);
}

// 1024 elements to each rank, on hosts of 8 cores.
double price_of_flat_all_to_all(const plan::LevelTree& tree, int host_level) {
  plan::Profile profile;
  profile.host_level = host_level;
  profile.cores = 8;
  plan::Shape shape;
  shape.op = moecclOpAllToAll;
  shape.n_ranks = tree.n_ranks;
  shape.count = 1024;
  return plan_price_ns(*algo::find(shape.op, "flat"), shape, tree, profile);
}

// Four thousand ranks: the programs of all ranks would take 2 GiB and half a minute.
TEST(PlanPrice, OfThousandsOfRanksTakesMilliseconds) {
  const plan::LevelTree tree = tree_of("node:512(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s,lat=2us)");
  const double ns = price_of_flat_all_to_all(tree, 0);
  // A node's uplink sends 8 * 4088 blocks of 4 KiB: 2.7 ms at 50 GB/s. Calls to the network take 6 us each: 25 ms.
  EXPECT_GT(ns, 2.7e6);
  EXPECT_LT(ns, 4e7);
}

// No level is wide enough to be halved alone until 128 ranks are left. Priced as a whole, this takes 16 s and 2 GiB.
TEST(PlanPrice, OfThreeMiddlingLevelsTakesMillisecondsToo) {
  const plan::LevelTree tree =
      tree_of("rail:16(bw=25GB/s,lat=9us) node:32(bw=50GB/s,lat=5us) gpu:8(bw=450GB/s,lat=2us)");
  const tests::Stopwatch watch;
  const double ns = price_of_flat_all_to_all(tree, 1);
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_GT(ns, 2.7e6);
  EXPECT_LT(ns, 2e8);
}

}  // namespace
}  // namespace moeccl::comm
