// SPDX-License-Identifier: Apache-2.0
#include "src/routing/routing.h"

#include <functional>
#include <numeric>
#include <random>
#include <set>

#include "tests/support/moe_cluster.h"

namespace moeccl {
namespace {

using algo::MoeAlgorithm;
using algo::PathKind;
using algo::Placement;
using test::MoeCase;
using test::MoeCluster;
using test::random_case;

TEST(PlacementTest, DefaultIsContiguousAndEven) {
  const Placement p = Placement::make(10, 4, nullptr).value();
  EXPECT_EQ(p.owner, (std::vector<uint32_t>{0, 0, 0, 1, 1, 1, 2, 2, 3, 3}));
  const Placement few = Placement::make(2, 5, nullptr).value();
  EXPECT_EQ(few.owner, (std::vector<uint32_t>{0, 1}));
  EXPECT_EQ(few.n_local(4), 0u);
}

TEST(PlacementTest, AnyMapAndItsMistakes) {
  const int32_t owner[] = {3, 0, 3, 1, 0};
  const Placement p = Placement::make(5, 4, owner).value();
  EXPECT_EQ(p.n_local(2), 0u);
  EXPECT_EQ(std::vector<uint32_t>(p.experts_of(3).begin(), p.experts_of(3).end()), (std::vector<uint32_t>{0, 2}));
  EXPECT_EQ(p.local_index[4], 1u);
  const int32_t wrong[] = {0, 4};
  const auto bad = Placement::make(2, 4, wrong);
  EXPECT_EQ(bad.status().code(), moecclInvalidArgument);
  EXPECT_NE(bad.status().message().find("expert_rank[1] is 4"), std::string::npos) << bad.status().message();
  EXPECT_EQ(Placement::make(0, 4, nullptr).status().code(), moecclInvalidArgument);
}

TEST(AlgorithmNamesTest, ParseListsWhatTheTreeOffers) {
  const plan::LevelTree tree = test::tree_of({{"node", {}, {2, 2}}});
  for (const MoeAlgorithm& a : algo::moe_candidates(tree))
    EXPECT_EQ(algo::parse_moe_algorithm(a.name(), tree).value(), a);
  const auto bad = algo::parse_moe_algorithm("hier:3", tree);
  EXPECT_EQ(bad.status().code(), moecclInvalidArgument);
  EXPECT_NE(bad.status().message().find("hier:2"), std::string::npos) << bad.status().message();
}

// Returns a tree of up to three levels whose groups differ in size.
plan::LevelTree random_tree(std::mt19937& random) {
  const auto draw = [&](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  std::vector<plan::LevelSizes> upper(1, {"node", {}, {}});
  for (uint32_t i = 0, n = 1 + draw(4); i < n; ++i) upper[0].sizes.push_back(1 + draw(3));
  if (draw(3) > 0) {
    const uint32_t n_sockets = std::accumulate(upper[0].sizes.begin(), upper[0].sizes.end(), 0u);
    upper.push_back({"socket", {}, {}});
    for (uint32_t i = 0; i < n_sockets; ++i) upper[1].sizes.push_back(1 + draw(4));
  }
  return test::tree_of(upper);
}

// Degrees are counted by classes of ranks, and edges() lists neighbours. Both must agree wherever experts are.
TEST(PathsTest, DegreesAreThoseOfTheListedEdges) {
  std::mt19937 random(17);
  for (int i = 0; i < 300; ++i) {
    const plan::LevelTree tree = random_tree(random);
    const uint32_t n = tree.n_ranks, n_homes = 1 + static_cast<uint32_t>(random() % n);
    std::vector<int32_t> owner(1 + random() % 20);
    for (int32_t& o : owner) o = static_cast<int32_t>((random() % n_homes) * 7 % n);
    const Placement placement = Placement::make(static_cast<int64_t>(owner.size()), n, owner.data()).value();
    for (const MoeAlgorithm& a : algo::moe_candidates(tree)) {
      const algo::Paths paths(a, tree, placement);
      size_t max_in = 0, max_out = 0;
      std::vector<size_t> max_origins(paths.n_hops(), 1), max_edges(paths.n_hops(), 0);
      for (uint32_t r = 0; r < n; ++r) {
        const algo::RankEdges edges = paths.edges(r);
        max_in = std::max(max_in, edges.in.size());
        max_out = std::max(max_out, edges.out.size());
        for (const algo::Edge& e : edges.in) max_origins[e.hop] = std::max(max_origins[e.hop], e.origins.size());
        for (const auto* side : {&edges.in, &edges.out})
          for (uint32_t j = 0; j < side->size(); ++j)
            max_edges[(*side)[j].hop] =
                std::max(max_edges[(*side)[j].hop],
                         size_t{1} + algo::place_in_hop(std::span(*side).first(j + 1), &algo::Edge::hop));
      }
      SCOPED_TRACE(format("case {}: {} ranks, {}", i, n, a.name()));
      ASSERT_EQ(paths.max_in(), max_in);
      ASSERT_EQ(paths.max_out(), max_out);
      for (uint32_t h = 0; h < paths.n_hops(); ++h) {
        ASSERT_EQ(paths.max_origins(h), max_origins[h]);
        ASSERT_EQ(paths.max_edges(h), max_edges[h]);
      }
    }
  }
}

TEST(PathsTest, EveryPathEndsAndUsesTheListedEdgesInOrderOfHops) {
  for (const test::NamedTree& t : test::moe_trees()) {
    const uint32_t n = t.tree.n_ranks;
    const Placement placement = Placement::make(std::max(1u, n - 1), n, nullptr).value();
    for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
      SCOPED_TRACE(format("{} ranks {} {}", t.name, n, a.name()));
      const algo::Paths paths(a, t.tree, placement);
      std::vector<algo::RankEdges> edges;
      uint32_t max_in = 0, max_out = 0, max_origins = 1;
      for (uint32_t r = 0; r < n; ++r) {
        edges.push_back(paths.edges(r));
        max_in = std::max(max_in, static_cast<uint32_t>(edges[r].in.size()));
        max_out = std::max(max_out, static_cast<uint32_t>(edges[r].out.size()));
        for (const algo::Edge& e : edges[r].in)
          max_origins = std::max(max_origins, static_cast<uint32_t>(e.origins.size()));
      }
      EXPECT_EQ(paths.max_in(), max_in);
      EXPECT_EQ(paths.max_out(), max_out);
      EXPECT_EQ(paths.max_origins(), max_origins);
      for (uint32_t o = 0; o < n; ++o) {
        for (uint32_t x = 0; x < n; ++x) {
          if (placement.n_local(x) == 0) continue;
          int hop = -1;
          for (uint32_t at = o; at != x;) {
            const uint32_t to = paths.next(at, x);
            ASSERT_TRUE(paths.edge(at, to)) << o << " to " << x;
            ASSERT_GT(static_cast<int>(paths.hop(at, to)), hop) << o << " to " << x;
            hop = static_cast<int>(paths.hop(at, to));
            const auto in = std::find_if(edges[to].in.begin(), edges[to].in.end(),
                                         [&](const algo::Edge& e) { return e.peer == at; });
            ASSERT_NE(in, edges[to].in.end());
            EXPECT_EQ(std::count(in->origins.begin(), in->origins.end(), o), 1) << o << " to " << x;
            const uint32_t hop_now = in->hop, before = hop_now == 0 ? 0 : edges[at].first_out_after(hop_now - 1);
            EXPECT_EQ(edges[at].out[before + in->peer_place].peer, to);
            at = to;
          }
        }
      }
    }
  }
}

// Returns the hops of a row, using only Groups::counterpart.
std::vector<std::pair<uint32_t, uint32_t>> way(const plan::LevelTree& tree, const MoeAlgorithm& a, uint32_t o,
                                               uint32_t x) {
  std::vector<std::pair<uint32_t, uint32_t>> hops;
  const plan::LevelTree cut = tree.truncated(a.kind == PathKind::k2dh ? 2 : a.dims);
  uint32_t at = o;
  if (a.kind == PathKind::k2dh && cut.level_between(o, x) == 0) {
    const uint32_t relay = plan::Groups(cut.levels[0]).counterpart(x, cut.levels[0].group_of_rank[o]);
    if (relay != o) hops.push_back({o, relay});
    hops.push_back({relay, x});
    return hops;
  }
  while (at != x) {
    const uint32_t level = cut.level_between(at, x);
    const uint32_t to = plan::Groups(cut.levels[level]).counterpart(at, cut.levels[level].group_of_rank[x]);
    hops.push_back({at, to});
    at = to;
  }
  return hops;
}

// Calls `check` for random routings of each tree, routed by each candidate.
void for_each_routing(
    uint32_t seed,
    const std::function<void(const test::NamedTree&, const MoeCase&, const MoeAlgorithm&, MoeCluster&)>& check) {
  test::Random random(seed);
  for (const test::NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 3; ++round) {
      const MoeCase c = random_case(t.tree, random);
      MoeCluster cluster(c, random());
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        SCOPED_TRACE(format("{} ranks {} {}", t.name, t.tree.n_ranks, a.name()));
        cluster.route(a, 0);
        check(t, c, a, cluster);
      }
    }
  }
}

// Eq. 7: with dedup each level carries a row once per distinct (token, group).
TEST(RoutingTest, RowsPerLevelAreTheDistinctTokenGroupPairs) {
  for_each_routing(1, [](const test::NamedTree& t, const MoeCase& c, const MoeAlgorithm& a, MoeCluster& cluster) {
    const uint32_t depth = t.tree.depth();
    std::vector<uint64_t> expected(depth, 0), sent(depth, 0), counted(depth, 0);
    for (uint32_t o = 0; o < cluster.n(); ++o) {
      size_t i = 0;
      for (uint64_t token = 0; token < c.tokens[o]; ++token) {
        std::set<std::pair<uint32_t, uint32_t>> once;
        for (uint32_t k = 0; k < cluster.own[o].n_experts[token]; ++k, ++i) {
          for (const auto& hop : way(t.tree, a, o, cluster.placement.owner[cluster.own[o].expert[i]])) {
            if (a.dedup() && !once.insert(hop).second) continue;
            ++expected[t.tree.level_between(hop.first, hop.second)];
          }
        }
      }
      std::vector<algo::LevelCount> levels;
      algo::count_rows({*cluster.paths, t.tree, cluster.placement, o}, t.tree, cluster.placement, cluster.own[o],
                       levels);
      for (uint32_t l = 0; l < depth; ++l) counted[l] += levels[l].rows;
      const algo::RankPaths& rank = cluster.rank_paths[o];
      for (size_t j = 0; j < rank.edges.out.size(); ++j)
        sent[t.tree.level_between(o, rank.edges.out[j].peer)] += cluster.tables[o].rows_out()[j];
    }
    EXPECT_EQ(sent, expected);
    EXPECT_EQ(counted, expected);
  });
}

TEST(RoutingTest, CountedReturnsAndDeliveriesAreThoseOfTheTables) {
  for_each_routing(8, [](const test::NamedTree& t, const MoeCase& c, const MoeAlgorithm& a, MoeCluster& cluster) {
    std::vector<uint64_t> returned(t.tree.depth(), 0), counted(t.tree.depth(), 0);
    uint64_t scattered = 0, delivered = 0;
    for (uint32_t r = 0; r < cluster.n(); ++r) {
      const algo::RowWays ways(*cluster.paths, t.tree, cluster.placement, r);
      std::vector<algo::LevelCount> levels;
      algo::count_rows(algo::returns_fewer(a, c.shape) ? ways.shared_by_rank() : ways, t.tree, cluster.placement,
                       cluster.own[r], levels);
      for (uint32_t l = 0; l < t.tree.depth(); ++l) counted[l] += levels[l].rows;
      const algo::RowWays experts = algo::RowWays::into_experts(cluster.placement, c.shape.expert_major);
      delivered += algo::rows_to_groups(experts, cluster.placement, cluster.own[r])[0];
      const algo::RankPaths& rank = cluster.rank_paths[r];
      const std::span<const plan::RowBlock> rows = cluster.tables[r].dispatch_rows(false);
      for (uint32_t source = 0; source <= rank.edges.in.size(); ++source)
        scattered += rows[rank.lists.scatter(source)].count;
      for (uint32_t i = 0; i < rank.edges.in.size(); ++i)
        returned[t.tree.level_between(r, rank.edges.in[i].peer)] += cluster.tables[r].rows_returned(i);
    }
    EXPECT_EQ(counted, returned);
    EXPECT_EQ(delivered, scattered);
  });
}

// Counts the outermost level without any notion of a path: a pair (token, other group) is one row.
TEST(RoutingTest, OutermostRowsCountedAsPairs) {
  MoeCase c;
  c.tree = test::tree_of({{"node", {}, {7, 8}}});
  c.n_experts = 30;
  c.shape.top_k = 6;
  c.tokens.assign(15, 50);
  c.shape.max_tokens = 50;
  MoeCluster cluster(c, 7);
  cluster.route({PathKind::kHier, 2}, 0);
  const std::vector<uint32_t>& node = c.tree.levels[0].group_of_rank;
  uint64_t pairs = 0, rows = 0;
  for (uint32_t o = 0; o < 15; ++o) {
    for (uint64_t t = 0; t < 50; ++t) {
      std::set<uint32_t> nodes;
      for (uint32_t k = 0; k < 6; ++k) {
        const int32_t e = cluster.index[o][t * 6 + k];
        if (e >= 0) nodes.insert(node[cluster.placement.owner[static_cast<uint32_t>(e)]]);
      }
      nodes.erase(node[o]);
      pairs += nodes.size();
    }
    const algo::RankPaths& rank = cluster.rank_paths[o];
    for (size_t j = 0; j < rank.edges.out.size(); ++j)
      if (node[rank.edges.out[j].peer] != node[o]) rows += cluster.tables[o].rows_out()[j];
  }
  EXPECT_EQ(rows, pairs);
}

TEST(RoutingTest, CapacityKeepsTheFirstTokensAndCountsTheRest) {
  const Placement placement = Placement::make(3, 1, nullptr).value();
  const algo::CanonicalOrder order(plan::LevelTree::flat(1), placement);
  algo::MoeShape shape;
  shape.top_k = 2;
  shape.capacity = 2;
  const int32_t index[] = {0, 1, 1, 0, 0, 2, -1, 1, 2, 1};
  algo::OwnChoices own;
  ASSERT_TRUE(own.assign(shape, placement, order, {index, nullptr, 5}).ok());
  EXPECT_EQ(own.drop_counts, (std::vector<int32_t>{1, 2, 0}));
  EXPECT_EQ(own.n_dropped, 3u);
  EXPECT_EQ(own.n_experts, (std::vector<uint8_t>{2, 2, 1, 0, 1}));
  EXPECT_EQ(own.expert, (std::vector<uint16_t>{0, 1, 0, 1, 2, 2}));
}

TEST(RoutingTest, WrongChoicesAreNamed) {
  const Placement placement = Placement::make(4, 2, nullptr).value();
  const algo::CanonicalOrder order(plan::LevelTree::flat(2), placement);
  algo::MoeShape shape;
  shape.top_k = 2;
  algo::OwnChoices own;
  const int32_t large[] = {0, 1, 2, 4};
  EXPECT_NE(own.assign(shape, placement, order, {large, nullptr, 2}).message().find("topk_index[1][1] is 4"),
            std::string::npos);
  const int32_t twice[] = {3, 3};
  const Status status = own.assign(shape, placement, order, {twice, nullptr, 1});
  EXPECT_EQ(status.code(), moecclInvalidArgument);
  EXPECT_NE(status.message().find("expert 3 twice"), std::string::npos) << status.message();
}

TEST(RoutingTest, OutputOrderIsSourceThenTokenForEveryAlgorithm) {
  test::Random random(3);
  for (const test::NamedTree& t : test::moe_trees()) {
    const MoeCase c = random_case(t.tree, random);
    MoeCluster cluster(c, random());
    for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
      cluster.route(a, 0);
      for (uint32_t r = 0; r < cluster.n(); ++r) {
        const algo::RoutingTables& tables = cluster.tables[r];
        std::vector<std::pair<int32_t, int32_t>> rows;
        if (!c.shape.expert_major) {
          for (uint32_t o = 0; o < cluster.n(); ++o)
            for (uint64_t token = 0; token < c.tokens[o]; ++token)
              for (const uint32_t e : cluster.placement.experts_of(r))
                if (cluster.kept_weight(o, token, e) >= 0) {
                  rows.push_back({static_cast<int32_t>(o), static_cast<int32_t>(token)});
                  break;
                }
        } else {
          for (const uint32_t e : cluster.placement.experts_of(r)) {
            for (uint32_t o = 0; o < cluster.n(); ++o)
              for (uint64_t token = 0; token < c.tokens[o]; ++token)
                if (cluster.kept_weight(o, token, e) >= 0)
                  rows.push_back({static_cast<int32_t>(o), static_cast<int32_t>(token)});
            while (rows.size() % c.shape.align_rows != 0) rows.push_back({-1, -1});
          }
        }
        ASSERT_EQ(tables.n_rows(), rows.size());
        for (size_t i = 0; i < rows.size(); ++i)
          ASSERT_EQ(rows[i], std::make_pair(tables.row_source[i], tables.row_token[i])) << a.name() << " row " << i;
      }
    }
  }
}

// The goal is 1 % of the payload between nodes, for rows of 7168 bf16 numbers and top-8 of 256 experts.
TEST(RoutingTest, MetadataBetweenNodesIsBelowOnePercent) {
  MoeCase c;
  c.tree = test::tree_of({{"node", {}, {8, 8}}});
  c.n_experts = 256;
  c.shape.top_k = 8;
  c.shape.row_bytes = 14336;
  c.tokens.assign(16, 128);
  c.shape.max_tokens = 128;
  c.none = 0;
  MoeCluster cluster(c, 5);
  for (const MoeAlgorithm& a : algo::moe_candidates(c.tree)) {
    cluster.route(a, 0);
    uint64_t metadata = 0, payload = 0;
    for (uint32_t r = 0; r < 16; ++r) {
      for (uint32_t p = 0; p < 16; ++p)
        if (c.tree.level_between(r, p) == 0) metadata += cluster.writers[r].bytes()[p];
      for (size_t j = 0; j < cluster.rank_paths[r].edges.out.size(); ++j)
        if (c.tree.level_between(r, cluster.rank_paths[r].edges.out[j].peer) == 0)
          payload += cluster.tables[r].rows_out()[j] * c.shape.row_bytes;
    }
    EXPECT_LT(static_cast<double>(metadata), 0.01 * static_cast<double>(payload)) << a.name();
  }
}

TEST(RoutingTest, WrongRecordsAreRefusedBeforeUse) {
  MoeCase c;
  c.tree = test::tree_of({{"node", {}, {2, 2}}});
  c.n_experts = 8;
  c.shape.top_k = 3;
  c.tokens.assign(4, 9);
  c.shape.max_tokens = 9;
  MoeCluster cluster(c, 11);
  test::Random random(12);
  int refused = 0;
  for (int round = 0; round < 3000; ++round) {
    const algo::Paths paths({PathKind::kHier, 2}, c.tree, cluster.placement);
    const algo::RankPaths rank(paths, c.tree, cluster.placement, 0);
    std::vector<std::vector<uint32_t>> messages(4);
    std::vector<algo::RecordView> views(4);
    views[0] = algo::view_of(cluster.own[0]);
    bool ok = true;
    for (uint32_t o = 1; o < 4; ++o) {
      algo::RecordWriter writer;
      writer.write(algo::Ways(paths, cluster.placement, o), cluster.placement, cluster.own[o]);
      messages[o].assign(writer.words().begin(),
                         writer.words().begin() + static_cast<ptrdiff_t>(writer.bytes()[0] / 4));
      if (o == 1 + static_cast<uint32_t>(round) % 3)
        messages[o][random() % messages[o].size()] ^= 1u << (random() % 32);
      auto view = algo::read_records(messages[o].data(), messages[o].size() * 4, true);
      ok = ok && view.ok();
      if (view.ok()) views[o] = view.value();
    }
    algo::RoutingTables tables;
    if (!ok || !tables.receive(rank, c.shape, views, c.tokens, true).ok()) {
      ++refused;
      continue;
    }
    uint64_t needed = 0;
    tables.build(tables.min_chunks(64, &needed));  // only a sanitizer notices errors here
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace moeccl
