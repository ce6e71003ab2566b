// SPDX-License-Identifier: Apache-2.0
#include "src/algo/moe_price.h"

#include <gtest/gtest.h>

#include "src/plan/cost.h"
#include "src/plan/printer.h"
#include "src/routing/hiermoe_model.h"
#include "src/routing/routing_source.h"
#include "tests/support/moe_cluster.h"

namespace moeccl::algo {
namespace {

using test::MoeCase;
using test::MoeCluster;

GlobalRouting routing_of(const MoeCluster& cluster) {
  GlobalRouting g;
  g.n_ranks = cluster.n();
  g.top_k = cluster.test_case.shape.top_k;
  g.first_token.push_back(0);
  for (uint32_t r = 0; r < cluster.n(); ++r) {
    g.first_token.push_back(g.first_token.back() + cluster.test_case.tokens[r]);
    g.expert.insert(g.expert.end(), cluster.index[r].begin(), cluster.index[r].end());
  }
  return g;
}

// The traffic of all ranks equals what each rank counts for Algorithm 1, and what its tables send.
TEST(MoeTraffic, IsWhatTheRanksCount) {
  test::Random random(3);
  for (const test::NamedTree& named : test::moe_trees()) {
    MoeCase c = test::random_case(named.tree, random);
    std::vector<std::pair<MoeAlgorithm, bool>> all;  // with expert domains?
    for (const MoeAlgorithm& a : moe_candidates(named.tree)) {
      all.emplace_back(a, false);
      if (a.kind != PathKind::k2dh) all.emplace_back(a, true);
    }
    for (const auto& [a, with_domains] : all) {
      c.domain.clear();
      for (uint32_t l = 0; l < c.tree.depth() && with_domains; ++l) c.domain.push_back(1 + random() % 4);
      MoeCluster cluster(c, 7);
      cluster.route(a, 0);
      auto traffic =
          count_traffic(*cluster.paths, {c.tree, cluster.placement, routing_of(cluster), false, cluster.domains.get()});
      ASSERT_TRUE(traffic.ok()) << traffic.status().message();
      std::vector<uint64_t> rows(c.tree.depth(), 0), sent(cluster.n(), 0);
      for (uint32_t r = 0; r < cluster.n(); ++r) {
        std::vector<LevelCount> counts;
        count_rows({*cluster.paths, c.tree, cluster.seen[r], r}, c.tree, cluster.seen[r], cluster.own[r], counts);
        for (uint32_t l = 0; l < c.tree.depth(); ++l) rows[l] += counts[l].rows;
      }
      EXPECT_EQ(traffic->level_rows, rows) << named.name << " " << a.name();
      for (uint32_t r = 0; r < cluster.n(); ++r) {
        const auto& outs = cluster.rank_paths[r].edges.out;
        ASSERT_EQ(traffic->out_first[r + 1] - traffic->out_first[r], outs.size());
        for (uint32_t e = traffic->out_first[r]; e < traffic->out_first[r + 1]; ++e) {
          for (size_t j = 0; j < outs.size(); ++j)
            if (outs[j].peer == traffic->edges[e].to) {
              EXPECT_EQ(traffic->edges[e].rows, cluster.tables[r].rows_out()[j]) << named.name << " " << a.name();
            }
        }
      }
    }
  }
}

// Compares a plan's cost with the row lists of a routing and with only their counts.
TEST(MoePrice, OfCountsIsThatOfRowLists) {
  const plan::LinkCost across{5000, 2.0}, inside{500, 20.0};
  auto tree = plan::LevelTree::from_sizes({{"node", across, {4, 4, 4}}}, "gpu", inside);
  ASSERT_TRUE(tree.ok());
  MoeCase c;
  c.tree = *tree;
  c.n_experts = 48;
  c.shape.top_k = 6;
  c.shape.row_bytes = 4096;
  c.shape.max_tokens = 256;
  c.tokens.assign(12, 256);
  c.none = 0;
  plan::Profile profile;
  profile.cores = 12;
  profile.host_copy_bytes_per_ns = 1000;
  for (const bool expert_major : {false, true}) {
    c.shape.expert_major = expert_major;
    for (const MoeAlgorithm& a : moe_candidates(c.tree)) {
      MoeCluster cluster(c, 5);
      cluster.route(a, 64);
      auto traffic = count_traffic(*cluster.paths, {c.tree, cluster.placement, routing_of(cluster), expert_major});
      ASSERT_TRUE(traffic.ok());
      for (const moecclOp_t op : {moecclOpDispatch, moecclOpCombine}) {
        const plan::Cost lists = plan::price(cluster.plan(op), cluster.bindings(op, false), c.tree, profile);
        const MoeCost counts =
            moe_price(op, *cluster.paths, *traffic, c.tree, profile, c.shape.row_bytes, cluster.tables[0].n_chunks());
        const std::string what = a.name() + " " + plan::op_title(op) + (expert_major ? " ExpertMajor" : " Rows");
        EXPECT_NEAR(counts.cost.total_ns / lists.total_ns, 1.0, 0.1) << what;
        EXPECT_EQ(counts.cost.level_bytes, lists.level_bytes) << what;
      }
    }
  }
}

// Every list's count, and the sums of combine, are those of a routing's tables.
TEST(MoeTraffic, CountsTheListsOfTheTables) {
  test::Random random(4);
  for (const test::NamedTree& named : test::moe_trees()) {
    const MoeCase c = test::random_case(named.tree, random);
    for (const MoeAlgorithm& a : moe_candidates(named.tree)) {
      MoeCluster cluster(c, 7);
      cluster.route(a, 0);
      auto traffic =
          count_traffic(*cluster.paths, {c.tree, cluster.placement, routing_of(cluster), c.shape.expert_major});
      ASSERT_TRUE(traffic.ok()) << traffic.status().message();
      for (uint32_t r = 0; r < cluster.n(); ++r) {
        const RowLists& lists = cluster.rank_paths[r].lists;
        ASSERT_EQ(traffic->first_list[r + 1] - traffic->first_list[r], lists.n_rows());
        ASSERT_EQ(cluster.tables[r].n_chunks(), 1u);
        const std::span<const plan::RowBlock> rows = cluster.tables[r].dispatch_rows(false);
        for (uint32_t list = 0; list < lists.n_rows(); ++list)
          EXPECT_EQ(traffic->rows[traffic->first_list[r] + list], rows[list].count)
              << named.name << " " << a.name() << " rank " << r << " list " << list;
      }
    }
  }
}

struct Layer {
  Layer(const plan::LevelTree& given, MoeAlgorithm algorithm, uint32_t n_experts, const GlobalRouting& routing)
      : tree(given),
        placement(Placement::make(n_experts, given.n_ranks, nullptr).value()),
        paths(algorithm, tree, placement),
        traffic(count_traffic(paths, {tree, placement, routing}).value()) {}
  MoeCost price(moecclOp_t op) const { return moe_price(op, paths, traffic, tree, plan::Profile(), 4096); }

  plan::LevelTree tree;
  Placement placement;
  Paths paths;
  Traffic traffic;
};

TEST(MoePrice, IsTheSameEveryTime) {
  auto tree = plan::LevelTree::from_sizes({{"node", {2000, 5}, std::vector<uint32_t>(8, 8)}});
  ASSERT_TRUE(tree.ok());
  const Layer layer(*tree, {PathKind::kHier, 2}, 128, make_routing({64, 128, 8, 64, 9}, 0.8).value());
  EXPECT_EQ(layer.price(moecclOpDispatch).cost.total_ns, layer.price(moecclOpDispatch).cost.total_ns);
}

// A shared uplink is the bottleneck: the time is at least its bytes at its rate, and it is nearly always in use.
TEST(MoePrice, ASharedUplinkBoundsTheTime) {
  auto tree = plan::LevelTree::from_sizes({{"node", {1000, 0.5}, {8, 8}}});
  ASSERT_TRUE(tree.ok());
  plan::Profile profile;
  profile.cores = 16;
  const Layer layer(*tree, {PathKind::kHier, 2}, 64, make_routing({16, 64, 4, 256, 2}, 0).value());
  const MoeCost run = moe_price(moecclOpDispatch, layer.paths, layer.traffic, layer.tree, profile, 4096);
  const double wire = static_cast<double>(run.cost.level_bytes[0]) / 2 / 0.5;
  EXPECT_GE(run.cost.total_ns, 0.98 * wire);
  EXPECT_LT(run.cost.total_ns, 1.25 * wire);
  EXPECT_GT(run.cost.busiest_ns[0], 0.98 * wire);
}

// Eight ranks whose rows wait for slow links, on fewer cores or on as many: no core does two things at a time, and what
// a rank moves does not fit its cache because its slots are small.
TEST(MoePrice, CoresBoundTheTime) {
  constexpr uint64_t kRowBytes = 4096;
  const plan::LinkCost link{2e6, 4};
  const plan::LevelTree tree = plan::LevelTree::from_sizes({{"node", link, {4, 4}}}, "gpu", link).value();
  const Placement placement = Placement::make(64, 8, nullptr).value();
  const GlobalRouting routing = make_routing({8, 64, 6, 512, 1}, 0).value();
  plan::Profile profile;
  profile.host_copy_bytes_per_ns = 1e3;
  for (const uint32_t cores : {1u, 2u, 8u}) {
    profile.cores = cores;
    for (const MoeAlgorithm& a :
         {MoeAlgorithm{PathKind::kFlat, 1}, MoeAlgorithm{PathKind::kHier, 1}, MoeAlgorithm{PathKind::kHier, 2}}) {
      const Paths paths(a, tree, placement);
      const Traffic traffic = count_traffic(paths, {tree, placement, routing, true}).value();
      double rows = 0;
      for (const uint32_t n : traffic.rows) rows += n;
      const double core_ns = rows * kRowBytes / profile.copy_bytes_per_ns / cores;
      for (const uint32_t chunks : {1u, 2u, 8u}) {
        const double ns = moe_price(moecclOpDispatch, paths, traffic, tree, profile, kRowBytes, chunks).cost.total_ns;
        EXPECT_GE(ns, core_ns) << a.name() << ", " << chunks << " chunks on " << cores << " cores";
      }
    }
  }
}

// Computes Eq. 3-5 by hand: every token of 4 ranks goes to one expert of each of two nodes.
TEST(HierMoeModel, IsTheEquationsByHand) {
  auto tree = plan::LevelTree::from_sizes({{"node", {}, {2, 2}}});
  ASSERT_TRUE(tree.ok());
  GlobalRouting routing{4, 2, {0}, {}};
  for (uint32_t r = 0; r < 4; ++r) {
    for (int t = 0; t < 10; ++t) routing.expert.insert(routing.expert.end(), {0, 2});
    routing.first_token.push_back(routing.first_token.back() + 10);
  }
  const Placement placement = Placement::make(4, 4, nullptr).value();
  const plan::AllToAllCosts costs{{100, 0.5}, {{1000, 1}}, {{10, 2}}};
  const Paths two({PathKind::kHier, 2}, *tree, placement), flat({PathKind::kFlat, 1}, *tree, placement);
  auto hier = count_traffic(two, {*tree, placement, routing}), all = count_traffic(flat, {*tree, placement, routing});
  ASSERT_TRUE(hier.ok() && all.ok());
  // Inter: 2 nodes x 10 rows; intra: 2 ranks x 20 rows (own and the counterpart's tokens).
  const HierMoeTime t = hiermoe_time({PathKind::kHier, 2}, *hier, *tree, costs, 8);
  EXPECT_DOUBLE_EQ(t.hop_ns[0], 1000 + 2 * 10 * 8 / 1.0);
  EXPECT_DOUBLE_EQ(t.hop_ns[1], 10 + 2 * 20 * 8 / 2.0);
  EXPECT_DOUBLE_EQ(hiermoe_time({PathKind::kFlat, 1}, *all, *tree, costs, 8).total_ns, 100 + 4 * 10 * 8 / 0.5);
  EXPECT_FALSE(hiermoe_knows({PathKind::kHier, 3}, costs).ok());
}

TEST(RoutingSource, DrawsDistinctExpertsAndSaysWhatIsWrong) {
  auto steep = make_routing({4, 16, 16, 50, 1}, 10);
  ASSERT_TRUE(steep.ok());
  EXPECT_TRUE(check_routing(*steep, 16).ok());
  EXPECT_FALSE(make_routing({4, 8, 9, 50, 1}, 0).ok());
  for (const char* bad : {"zipf:", "zipf:x", "zipf:-1", "zipf:nan", "trace:", "even", " uniform", "zipf:11"}) {
    auto kind = parse_routing_kind(bad);
    ASSERT_FALSE(kind.ok()) << bad;
    EXPECT_NE(kind.status().message().find("position"), std::string::npos) << bad;
  }
  auto trace = parse_routing_kind("trace:/a:b/c.trace:2:7");
  ASSERT_TRUE(trace.ok());
  EXPECT_EQ(trace->path, "/a:b/c.trace");
  EXPECT_EQ(trace->layer, 2u);
  EXPECT_EQ(trace->step, 7u);
}

std::vector<std::byte> trace_file(const std::vector<uint32_t>& words) {
  std::vector<std::byte> file;
  for (const char c : std::string("MOETRACE")) file.push_back(static_cast<std::byte>(c));
  for (const uint32_t w : words)
    for (int i = 0; i < 4; ++i) file.push_back(static_cast<std::byte>((w >> (8 * i)) & 0xff));
  return file;
}

TEST(RoutingSource, ReadsATraceAndNamesTheByteOfAMistake) {
  // version, layers, steps, tokens, k, experts; 2 layers x 1 step x 3 tokens x 2.
  const std::vector<uint32_t> good = {1, 2, 1, 3, 2, 4, 0, 1, 2, 3, 1, 0, 3, 2, 1, 0, ~0u, 3};
  TraceShape shape;
  auto routing = read_trace(trace_file(good), {RoutingKind::kTrace, 0, "t", 1, 0}, {2, 0, 0, 0, 0}, &shape);
  ASSERT_TRUE(routing.ok()) << routing.status().message();
  EXPECT_EQ(routing->expert, (std::vector<int32_t>{3, 2, 1, 0, -1, 3}));
  EXPECT_EQ(routing->first_token, (std::vector<uint64_t>{0, 1, 3}));
  for (size_t n = 0; n < trace_file(good).size(); ++n) {  // cut short anywhere
    std::vector<std::byte> cut = trace_file(good);
    cut.resize(n);
    auto bad = read_trace(cut, {RoutingKind::kTrace, 0, "t", 0, 0}, {2, 0, 0, 0, 0}, &shape);
    ASSERT_FALSE(bad.ok()) << n;
    EXPECT_NE(bad.status().message().find("byte"), std::string::npos);
  }
  std::vector<uint32_t> twice = good;
  twice[7] = 0;
  EXPECT_FALSE(read_trace(trace_file(twice), {RoutingKind::kTrace, 0, "t", 0, 0}, {2, 0, 0, 0, 0}, &shape).ok());
}

}  // namespace
}  // namespace moeccl::algo
