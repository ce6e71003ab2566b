// SPDX-License-Identifier: Apache-2.0
// The cost of a routing's plan: latencies of hops that wait for one another, bytes, and the cores that pack rows.
#include "src/select/routing_price.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <ostream>

#include "src/algo/moe_price.h"
#include "src/plan/hardware.h"
#include "src/routing/hiermoe_model.h"
#include "src/routing/routing_source.h"

namespace moeccl::algo {
namespace {

constexpr MoeAlgorithm kFlat{PathKind::kFlat, 1}, kHier1{PathKind::kHier, 1}, kHier2{PathKind::kHier, 2},
    kHier3{PathKind::kHier, 3};

// 2 x 2 x 2 ranks. Every link has this latency and bandwidth.
plan::LevelTree tree_of(double alpha_ns, double bytes_per_ns) {
  const plan::LinkCost link{alpha_ns, bytes_per_ns};
  Result<plan::LevelTree> tree =
      plan::LevelTree::from_sizes({{"node", link, {2, 2}}, {"socket", link, {2, 2, 2, 2}}}, "gpu", link);
  EXPECT_TRUE(tree.ok()) << tree.status().message();
  return *tree;
}

// Distributes the rows of all ranks across each level evenly.
MoeRows rows_of(const plan::LevelTree& tree, std::vector<uint64_t> across, uint64_t row_bytes) {
  MoeRows rows;
  for (uint32_t l = 0; l < tree.depth(); ++l)
    rows.levels.push_back({across[l], static_cast<double>(across[l]) / tree.levels[l].n_groups});
  rows.row_bytes = row_bytes;
  return rows;
}

// Returns the profile of a machine that packs rows in no time.
plan::Profile links_alone() {
  plan::Profile profile;
  profile.stream_bytes_per_ns = profile.cached_copy_bytes_per_ns = profile.host_copy_bytes_per_ns = 1e9;
  profile.switch_ns = 0;
  return profile;
}

TEST(RoutingPrice, OneHopPaysOneLatencyHoweverManyLevelsItCrosses) {
  const plan::LevelTree tree = tree_of(2e6, 10);
  const MoePrice flat = price(kFlat, tree, links_alone(), rows_of(tree, {100, 80, 30}, 1000));
  EXPECT_DOUBLE_EQ(flat.dispatch.latency_us, 2000);
  const MoePrice one = price(kHier1, tree, links_alone(), rows_of(tree, {100, 80, 30}, 1000));
  EXPECT_DOUBLE_EQ(one.dispatch.latency_us, 2000);
  // 50 rows leave the busiest node: 50 KB at 10 bytes per ns.
  EXPECT_NEAR(flat.dispatch.link_us, 5, 1e-9);
}

TEST(RoutingPrice, EveryFurtherHopWaitsForTheOneBefore) {
  const plan::LevelTree tree = tree_of(2e6, 10);
  EXPECT_DOUBLE_EQ(price(kHier2, tree, links_alone(), rows_of(tree, {50, 80, 40}, 1000)).dispatch.latency_us, 4000);
  EXPECT_DOUBLE_EQ(price(kHier3, tree, links_alone(), rows_of(tree, {50, 80, 60}, 1000)).dispatch.latency_us, 6000);
}

// HierMoE's trade-off (Eq. 6): the plain algorithm wins where latency dominates, and the one with the fewest bytes
// across the slow level wins where bytes dominate.
TEST(RoutingPrice, FewTokensOnSlowLinksGoFlat) {
  const auto chosen = [](double alpha_ns, double bytes_per_ns, uint64_t row_bytes) {
    const plan::LevelTree tree = tree_of(alpha_ns, bytes_per_ns);
    const std::vector<MoePrice> prices = {price(kHier1, tree, links_alone(), rows_of(tree, {90, 70, 30}, row_bytes)),
                                          price(kHier2, tree, links_alone(), rows_of(tree, {40, 80, 40}, row_bytes)),
                                          price(kHier3, tree, links_alone(), rows_of(tree, {40, 60, 70}, row_bytes)),
                                          price(kFlat, tree, links_alone(), rows_of(tree, {110, 80, 30}, row_bytes))};
    return prices[cheapest(prices)].algorithm.name();
  };
  EXPECT_EQ(chosen(2e6, 10, 14336), "hier:1");
  EXPECT_EQ(chosen(5e3, 0.25, 14336), "hier:2");
}

TEST(RoutingPrice, ChunksThatWouldWaitForLatencyAreNotCut) {
  const plan::LevelTree slow = tree_of(2e6, 10), near = tree_of(5e3, 0.25);
  const MoePrice few = price(kHier2, slow, links_alone(), rows_of(slow, {2000, 3000, 2000}, 4096));
  EXPECT_LE(few.n_chunks, moe_plan_depth(true)) << "the slots of one round";
  EXPECT_EQ(few.most_chunks, few.n_chunks);
  EXPECT_DOUBLE_EQ(few.dispatch.latency_us, 4000);
  const MoePrice many = price(kHier2, near, links_alone(), rows_of(near, {2000, 3000, 2000}, 4096));
  EXPECT_GT(many.n_chunks, 2u);
  EXPECT_EQ(many.most_chunks, kMoePipelineChunks);
}

TEST(RoutingPrice, RanksThatShareCoresPackMoreSlowly) {
  const plan::LevelTree tree = tree_of(0, 0);
  const auto packing = [&](uint32_t cores, double host_bytes_per_ns) {
    plan::Profile profile;
    profile.cores = cores;
    profile.switch_ns = 0;
    profile.host_copy_bytes_per_ns = host_bytes_per_ns;
    const MoePrice p = price(kFlat, tree, profile, rows_of(tree, {80'000, 80'000, 80'000}, 4096));
    EXPECT_EQ(p.dispatch.link_us, 0);
    return p.dispatch_us();
  };
  EXPECT_DOUBLE_EQ(packing(2, 1e9), 4 * packing(8, 1e9));
  EXPECT_DOUBLE_EQ(packing(2, 10), packing(8, 10)) << "more cores do not make memory faster";
}

// Eight ranks on two cores: four of them run one after another before a hop has ended.
TEST(RoutingPrice, EveryHopWaitsForACoreWhereRanksShareThem) {
  const plan::LevelTree tree = tree_of(1e3, 10);
  plan::Profile profile = links_alone();
  profile.switch_ns = 2000;
  const auto latency_us = [&](const MoeAlgorithm& a) {
    return price(a, tree, profile, rows_of(tree, {50, 80, 60}, 1000)).dispatch.latency_us;
  };
  profile.cores = 2;
  EXPECT_DOUBLE_EQ(latency_us(kFlat), 1 + 8);
  EXPECT_DOUBLE_EQ(latency_us(kHier3), 3 * (1 + 8));
  profile.cores = 8;
  EXPECT_DOUBLE_EQ(latency_us(kFlat), 1);
  EXPECT_DOUBLE_EQ(latency_us(kHier3), 3);
}

TEST(RoutingPrice, MeasuredLinksComeBeforeTheTopologys) {
  const plan::LevelTree tree = tree_of(1e3, 1);
  plan::Profile profile = links_alone();
  profile.links = {{5e3, 2}, {7e3, 3}, {7e3, 3}};
  EXPECT_DOUBLE_EQ(price(kFlat, tree, profile, rows_of(tree, {100, 0, 0}, 1000)).dispatch.latency_us, 7) << "one host";
  profile.host_level = 0;
  const MoePrice hosts = price(kFlat, tree, profile, rows_of(tree, {100, 0, 0}, 1000));
  EXPECT_DOUBLE_EQ(hosts.dispatch.latency_us, 7);
  EXPECT_DOUBLE_EQ(hosts.level_us[0], 25);
  profile.host_level = 5;  // from a file for a deeper tree
  EXPECT_DOUBLE_EQ(price(kFlat, tree, profile, rows_of(tree, {100, 0, 0}, 1000)).dispatch.latency_us, 7);
  EXPECT_DOUBLE_EQ(plan::ranks_per_host(tree, profile), 8) << "one host";
}

// A layer of eight experts on each of eight ranks.
class Layer {
 public:
  Layer(plan::LevelTree tree, plan::Profile profile, uint32_t top_k, uint64_t tokens, bool expert_major)
      : tree_(std::move(tree)),
        profile_(std::move(profile)),
        top_k_(top_k),
        tokens_(tokens),
        expert_major_(expert_major),
        routing_(make_routing({8, kExperts, top_k, tokens, 1}, 0).value()) {}

  Paths paths(const MoeAlgorithm& a) const { return Paths(a, tree_, placement_); }
  // Returns what a layer would compute from the counts of all its ranks.
  MoePrice priced(const Paths& paths) const {
    MoeShape shape;
    shape.top_k = top_k_;
    shape.expert_major = expert_major_;
    std::vector<LevelCount> sent, returned;
    MoeRows rows;
    for (uint32_t r = 0; r < tree_.n_ranks; ++r) {
      OwnChoices own;
      const int32_t* first = routing_.expert.data() + routing_.first_token[r] * top_k_;
      EXPECT_TRUE(own.assign(shape, placement_, order_, {first, nullptr, tokens_}).ok());
      const RowWays ways(paths, tree_, placement_, r);
      std::vector<LevelCount> counts;
      count_rows(ways, tree_, placement_, own, counts);
      sent.insert(sent.end(), counts.begin(), counts.end());
      count_rows(ways.shared_by_rank(), tree_, placement_, own, counts);
      returned.insert(returned.end(), counts.begin(), counts.end());
      rows.delivered += rows_to_groups(RowWays::into_experts(placement_, shape.expert_major), placement_, own)[0];
    }
    rows.delivered /= tree_.n_ranks;
    rows.levels = level_loads(tree_, sent);
    rows.row_bytes = kRowBytes;
    rows.tokens = static_cast<double>(tokens_);
    if (returns_fewer(paths.algorithm(), shape)) rows.returned = level_loads(tree_, returned);
    return price(paths.algorithm(), tree_, profile_, rows);
  }
  double simulated_us(moecclOp_t op, const Paths& paths, uint32_t n_chunks) const {
    const Traffic traffic = count_traffic(paths, {tree_, placement_, routing_, expert_major_}).value();
    return moe_price(op, paths, traffic, tree_, profile_, kRowBytes, n_chunks).cost.total_ns / 1000;
  }

 private:
  static constexpr uint32_t kExperts = 64;
  static constexpr uint64_t kRowBytes = 4096;
  plan::LevelTree tree_;
  plan::Profile profile_;
  uint32_t top_k_;
  uint64_t tokens_;
  bool expert_major_;
  Placement placement_ = Placement::make(kExperts, 8, nullptr).value();
  CanonicalOrder order_{tree_, placement_};
  GlobalRouting routing_;
};

class TwoLayouts : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(RoutingPrice, TwoLayouts, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "ExpertMajor" : "Rows"; });

TEST_P(TwoLayouts, PlansWithoutDeduplicationCostWhatTheSimulationSays) {
  const Layer layer(plan::LevelTree::from_sizes({{"node", {5000, 2}, {4, 4}}}, "gpu", {1000, 10}).value(),
                    plan::kernel_hardware().profile, 8, 256, GetParam());
  for (const MoeAlgorithm& a : {kFlat, MoeAlgorithm{PathKind::k2dh, 1}}) {
    const Paths paths = layer.paths(a);
    const MoePrice p = layer.priced(paths);
    EXPECT_NEAR(p.dispatch_us() / layer.simulated_us(moecclOpDispatch, paths, p.n_chunks), 1, 0.1) << a.name();
    EXPECT_NEAR(p.combine_us() / layer.simulated_us(moecclOpCombine, paths, p.n_chunks), 1, 0.1) << a.name();
    EXPECT_EQ(p.combine_us() < 0.95 * p.dispatch_us(), !GetParam()) << a.name();
  }
}

struct Machine {
  const char* name;
  uint32_t cores;
  double copy, host_copy, reduce;  // beyond the cache
};
void PrintTo(const Machine& m, std::ostream* out) { *out << m.name; }

class PacedGrid : public ::testing::TestWithParam<Machine> {};
INSTANTIATE_TEST_SUITE_P(RoutingPrice, PacedGrid,
                         ::testing::Values(Machine{"TwoCores", 2, 8.7, 20, 14}, Machine{"TwoSlowCores", 2, 4, 9.3, 8},
                                           Machine{"ACoreForEachRank", 8, 8.7, 80, 14},
                                           Machine{"ASlowCoreForEachRank", 8, 4, 40, 8}),
                         [](const auto& test) { return test.param.name; });

// The clock of cost.h runs every copy, transfer and wait of all ranks. The closed form knows only the rows of each
// level, and must come near it where latencies, links or cores decide, and where they hide one another.
TEST_P(PacedGrid, PricesAreThoseOfTheClock) {
  plan::Profile profile;
  profile.cores = GetParam().cores;
  profile.copy_bytes_per_ns = GetParam().copy;
  profile.host_copy_bytes_per_ns = GetParam().host_copy;
  profile.reduce_bytes_per_ns = GetParam().reduce;
  std::vector<double> errors;
  double regrets = 0, largest = 0;
  for (const double alpha_ns : {5e3, 1e5, 2e6}) {
    for (const uint64_t tokens : {4, 64, 512}) {
      const plan::LevelTree tree =
          plan::LevelTree::from_sizes({{"node", {alpha_ns, 2}, {2, 2}}, {"qpi", {alpha_ns, 4}, {2, 2, 2, 2}}}, "gpu",
                                      {alpha_ns, 8})
              .value();
      const Layer layer(tree, profile, 6, tokens, true);
      double chosen_us = 0, cheapest_us = 0, best_us = 0;
      for (const MoeAlgorithm& a : {kFlat, kHier1, kHier2, kHier3}) {
        const Paths paths = layer.paths(a);
        const MoePrice p = layer.priced(paths);
        double both_us = 0;
        for (const moecclOp_t op : {moecclOpDispatch, moecclOpCombine}) {
          const double us = layer.simulated_us(op, paths, p.n_chunks);
          errors.push_back(std::abs((op == moecclOpDispatch ? p.dispatch : p.combine).total_us / us - 1));
          EXPECT_LE(errors.back(), 0.25) << a.name() << ", " << tokens << " tokens, " << alpha_ns << " ns, op " << op;
          both_us += us;
        }
        if (cheapest_us == 0 || p.both_us() < cheapest_us) cheapest_us = p.both_us(), chosen_us = both_us;
        if (best_us == 0 || both_us < best_us) best_us = both_us;
      }
      regrets += std::log(chosen_us / best_us) / 9;
      largest = std::max(largest, chosen_us / best_us);
    }
  }
  std::sort(errors.begin(), errors.end());
  std::printf("median error %.3f, largest %.3f; regret %.3f, at most %.3f\n", errors[errors.size() / 2], errors.back(),
              std::exp(regrets), largest);
  EXPECT_LE(errors[errors.size() / 2], 0.05);
  EXPECT_LE(std::exp(regrets), 1.02);
  EXPECT_LE(largest, 1.1);
}

// A level with one group: no row crosses the first hop, and the second one packs all the same.
TEST(RoutingPrice, AHopBehindAnEmptyOnePacksItsRows) {
  const plan::LinkCost link{5e3, 4};
  plan::Profile profile;
  profile.cores = 8;
  const Layer layer(plan::LevelTree::from_sizes({{"node", link, {8}}}, "gpu", link).value(), profile, 6, 64, true);
  const Paths paths = layer.paths(kHier2);
  const MoePrice p = layer.priced(paths);
  EXPECT_NEAR(p.dispatch_us() / layer.simulated_us(moecclOpDispatch, paths, p.n_chunks), 1, 0.2);
}

// With one expert for every rank there is nothing to share, so each way has the same copies. A rank that has seven
// peers packs for one while the rows for another travel.
TEST(RoutingPrice, PeersOfOneHopOverlap) {
  const plan::LevelTree tree = tree_of(0, 1);
  plan::Profile profile;
  profile.cores = 8;
  profile.switch_ns = 0;
  profile.copy_bytes_per_ns = profile.cached_copy_bytes_per_ns = 1;
  profile.host_copy_bytes_per_ns = 8;
  MoeRows rows = rows_of(tree, {400, 400, 400}, 1000);
  rows.delivered = 150;
  rows.tokens = 1;
  const MoePrice flat = price(kFlat, tree, profile, rows);
  ASSERT_EQ(flat.n_chunks, 1u);
  const double packing_us = 150, link_us = 200, spreading_us = 150;
  EXPECT_GE(flat.dispatch_us(), link_us + packing_us / 7);
  EXPECT_LE(flat.dispatch_us(), std::max(packing_us + spreading_us, link_us + packing_us / 7 + spreading_us / 4));
  // hier:3 sends to one peer in each hop, and every hop needs the rows before it.
  EXPECT_GE(price(kHier3, tree, profile, rows).dispatch_us(), 1.5 * flat.dispatch_us());
}

// In an AlltoAll, part of a rank's buffer stays within its group. The rest takes the time that the link needs.
TEST(HierMoeModel, LinksGiveTheAlltoAllsThatNobodyHasMeasured) {
  const plan::AllToAllCosts costs = all_to_all_of_links(tree_of(1e3, 1));
  EXPECT_DOUBLE_EQ(costs.standard.bytes_per_ns, 0.5) << "four ranks send half of their buffers over one link";
  EXPECT_DOUBLE_EQ(costs.standard.alpha_ns, 1e3);
  ASSERT_EQ(costs.inter.size(), 2U);
  EXPECT_DOUBLE_EQ(costs.inter[0].bytes_per_ns, 0.5);
  EXPECT_DOUBLE_EQ(costs.inter[1].bytes_per_ns, 1);
  EXPECT_DOUBLE_EQ(costs.intra[0].bytes_per_ns, 1);
  EXPECT_DOUBLE_EQ(costs.intra[1].bytes_per_ns, 2);
}

}  // namespace
}  // namespace moeccl::algo
