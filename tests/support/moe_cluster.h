// SPDX-License-Identifier: Apache-2.0
// All ranks of a MoE routing in one thread: trees, random choices, the exchange of records, and the tables of every
// rank.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <vector>

#include "src/algo/moe_plan.h"
#include "src/routing/domains.h"
#include "tests/support/moe_plan.h"

namespace moeccl::test {

inline plan::LevelTree tree_of(const std::vector<plan::LevelSizes>& upper) {
  auto tree = plan::LevelTree::from_sizes(upper);
  EXPECT_TRUE(tree.ok()) << tree.status().message();
  return tree.value();
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  uint32_t operator()() { return static_cast<uint32_t>(engine_()); }
  double unit() { return static_cast<double>((*this)()) / 4294967296.0; }

 private:
  std::mt19937 engine_;
};

struct NamedTree {
  const char* name;
  plan::LevelTree tree;
};
inline std::vector<NamedTree> moe_trees() {
  std::vector<NamedTree> trees;
  for (const uint32_t n : {1u, 2u, 3u, 5u, 8u, 16u}) trees.push_back({"flat", plan::LevelTree::flat(n)});
  trees.push_back({"2x4", tree_of({{"node", {}, {4, 4}}})});
  trees.push_back({"7+8", tree_of({{"node", {}, {7, 8}}})});
  trees.push_back({"1+4+3", tree_of({{"node", {}, {1, 4, 3}}})});
  trees.push_back({"1x3", tree_of({{"node", {}, {3}}})});
  trees.push_back({"2x2x4", tree_of({{"node", {}, {2, 2}}, {"socket", {}, {4, 4, 4, 4}}})});
  trees.push_back({"(2+1)+(3)", tree_of({{"node", {}, {2, 1}}, {"socket", {}, {2, 1, 3}}})});
  // Ranks are dealt to the nodes in turn, as some launchers do.
  plan::LevelTree dealt = plan::LevelTree::flat(7);
  dealt.levels.insert(dealt.levels.begin(), {"node", {}, {0, 1, 2, 0, 1, 2, 0}, 3});
  EXPECT_TRUE(dealt.validate().ok());
  trees.push_back({"dealt", dealt});
  return trees;
}

struct MoeCase {
  plan::LevelTree tree;
  algo::MoeShape shape;
  uint32_t n_experts = 8;
  std::vector<int32_t> owner;    // empty: default placement
  std::vector<uint64_t> tokens;  // [n_ranks]
  bool weighted = true;
  double none = 0.1;                  // share of choices that are -1
  uint32_t hot_experts = 0;           // > 0: choices come only from this many first experts
  std::vector<uint32_t> domain = {};  // [levels] sizes of expert domains; empty: none
};

inline MoeCase random_case(const plan::LevelTree& tree, Random& random) {
  MoeCase c;
  c.tree = tree;
  c.n_experts = 1 + random() % (3 * tree.n_ranks);
  c.shape.top_k = 1 + random() % std::min(c.n_experts, 8u);
  c.shape.row_bytes = 32;
  c.shape.expert_major = random() % 2 == 0;
  c.shape.align_rows = 1 + random() % 5;
  c.weighted = random() % 2 == 0;
  if (random() % 2 == 0) {
    c.owner.resize(c.n_experts);
    for (int32_t& o : c.owner) o = static_cast<int32_t>(random() % tree.n_ranks);
  }
  for (uint32_t r = 0; r < tree.n_ranks; ++r) {
    c.tokens.push_back(random() % 4 == 0 ? 0 : random() % 40);
    c.shape.max_tokens = std::max(c.shape.max_tokens, c.tokens.back());
  }
  return c;
}

class MoeCluster {
 public:
  MoeCluster(const MoeCase& c, uint32_t seed)
      : test_case(c),
        placement(
            algo::Placement::make(c.n_experts, c.tree.n_ranks, c.owner.empty() ? nullptr : c.owner.data()).value()),
        order(c.tree, placement) {
    Random random(seed);
    own.resize(n());
    if (!c.domain.empty()) domains = std::make_unique<algo::Domains>(algo::Domains::make(c.tree, c.domain).value());
    for (uint32_t r = 0; r < n(); ++r) {
      seen.push_back(domains ? domains->seen_from(r, placement) : placement);
      const algo::CanonicalOrder own_order(c.tree, seen[r]);
      draw(random, c.tokens[r]);
      const algo::TopK topk{index.back().data(), c.weighted ? weight.back().data() : nullptr, c.tokens[r]};
      const Status status = own[r].assign(c.shape, seen[r], own_order, topk);
      EXPECT_TRUE(status.ok()) << status.message();
    }
  }
  uint32_t n() const { return test_case.tree.n_ranks; }

  // Exchanges records and builds every rank's tables for slots of slot_rows (0: as many as one chunk needs).
  void route(algo::MoeAlgorithm algorithm, uint64_t slot_rows) {
    paths = std::make_unique<algo::Paths>(algorithm, test_case.tree, placement, domains.get());
    rank_paths.clear();
    writers.assign(n(), {});
    tables = std::vector<algo::RoutingTables>(n());
    std::vector<std::vector<algo::RecordView>> views(n(), std::vector<algo::RecordView>(n()));
    for (uint32_t r = 0; r < n(); ++r) {
      rank_paths.emplace_back(*paths, test_case.tree, seen[r], r);
      writers[r].write(algo::Ways(*paths, seen[r], r), seen[r], own[r]);
      const uint32_t* at = writers[r].words().data();
      for (uint32_t p = 0; p < n(); ++p) {
        auto view = algo::read_records(at, writers[r].bytes()[p], test_case.weighted);
        ASSERT_TRUE(view.ok()) << view.status().message();
        views[p][r] = view.value();
        at += writers[r].bytes()[p] / 4;
      }
      views[r][r] = algo::view_of(own[r]);
    }
    uint32_t n_chunks = 1;
    slot_rows_ = slot_rows;
    for (uint32_t r = 0; r < n(); ++r) {
      const Status status =
          tables[r].receive(rank_paths[r], test_case.shape, views[r], test_case.tokens, test_case.weighted);
      ASSERT_TRUE(status.ok()) << status.message();
      if (slot_rows == 0) slot_rows_ = std::max(slot_rows_, std::max<uint64_t>(1, tables[r].largest_edge_rows()));
    }
    for (uint32_t r = 0; r < n(); ++r) {
      uint64_t needed = 0;
      const uint32_t least = tables[r].min_chunks(slot_rows_, &needed);
      ASSERT_GT(least, 0u) << "slots of " << slot_rows_ << " rows, needs " << needed;
      n_chunks = std::max(n_chunks, least);
    }
    plan_shape = algo::moe_plan_shape(*paths, test_case.shape.expert_major, slot_rows_);
    for (uint32_t r = 0; r < n(); ++r) tables[r].build(n_chunks);
  }

  plan::Plan plan(moecclOp_t op, bool batched = false) const {
    algo::MoePlanShape shape = plan_shape;
    shape.batched = batched;
    plan::Plan p = algo::build_moe_plan(op, *paths, test_case.tree, placement, shape, domains.get());
    p.chunking = {slot_rows_, tables[0].n_chunks()};
    return p;
  }
  std::vector<plan::Binding> bindings(moecclOp_t op, bool weighted) const {
    std::vector<plan::Binding> all;
    for (uint32_t r = 0; r < n(); ++r) {
      plan::Binding b = algo::moe_binding(test_case.shape, tables[r].n_chunks(), slot_rows_);
      if (op == moecclOpDispatch) {
        b.rows = tables[r].dispatch_rows(weighted);
        b.sums = tables[r].dispatch_sums();
      } else {
        b.sums = tables[r].combine_sums(weighted);
      }
      all.push_back(b);
    }
    return all;
  }
  float weight_of(uint32_t rank, uint64_t token, uint32_t k) const {
    return test_case.weighted ? weight[rank][token * test_case.shape.top_k + k] : 1.0f;
  }
  // Returns the weight of `expert` in a token's kept choices, or -1 when it is not among them.
  float kept_weight(uint32_t rank, uint64_t token, uint32_t expert) const {
    size_t i = 0;
    for (uint64_t t = 0; t < token; ++t) i += own[rank].n_experts[t];
    for (uint32_t k = 0; k < own[rank].n_experts[token]; ++k, ++i)
      if (own[rank].expert[i] == expert) return test_case.weighted ? own[rank].weight[i] : 1.0f;
    return -1;
  }

  MoeCase test_case;
  algo::Placement placement;
  algo::CanonicalOrder order;
  std::unique_ptr<algo::Domains> domains;  // null: none
  std::vector<algo::Placement> seen;       // [n_ranks] the rank that computes each expert for this rank
  std::vector<std::vector<int32_t>> index;
  std::vector<std::vector<float>> weight;
  std::vector<algo::OwnChoices> own;
  std::unique_ptr<algo::Paths> paths;
  std::vector<algo::RankPaths> rank_paths;
  std::vector<algo::RecordWriter> writers;
  std::vector<algo::RoutingTables> tables;
  algo::MoePlanShape plan_shape;
  uint64_t slot_rows_ = 1;

 private:
  void draw(Random& random, uint64_t n_tokens) {
    const uint32_t k = test_case.shape.top_k;
    std::vector<int32_t> all(test_case.hot_experts ? test_case.hot_experts : test_case.n_experts);
    for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
    std::vector<int32_t>& choices = index.emplace_back(n_tokens * k, -1);
    std::vector<float>& weights = weight.emplace_back(n_tokens * k);
    for (uint64_t t = 0; t < n_tokens; ++t) {
      for (uint32_t i = 0; i < k; ++i) {
        weights[t * k + i] = 0.125f * static_cast<float>(1 + random() % 15);
        if (i >= all.size() || random.unit() < test_case.none) continue;
        std::swap(all[i], all[i + random() % (all.size() - i)]);
        choices[t * k + i] = all[i];
      }
    }
  }
};

}  // namespace moeccl::test
