// SPDX-License-Identifier: Apache-2.0
// A rank's own choices, counts of rows on the links and records for the peers, compared byte for byte with
// src/routing/routing.h.
#include <set>

#include "kernels/cuda/route_args.h"
#include "src/routing/routing.h"
#include "tests/support/moe_cluster.h"
#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

struct Own {
  algo::MoeShape shape;
  algo::Placement placement;
  std::vector<int32_t> index;
  std::vector<float> weight;  // empty: none
  uint32_t n_tokens = 0;

  const float* weights() const { return weight.empty() ? nullptr : weight.data(); }
};

// Draws the choices of one rank: no, few or many tokens, ties to one expert, holes, capacity.
Own draw(const plan::LevelTree& tree, Random& random) {
  Own o;
  const auto n_experts = static_cast<uint32_t>(1 + random.below(3 * tree.n_ranks));
  std::vector<int32_t> owner;
  for (uint32_t e = 0; e < n_experts; ++e) owner.push_back(static_cast<int32_t>(random.below(tree.n_ranks)));
  o.placement = algo::Placement::make(n_experts, tree.n_ranks, random.chance(50) ? owner.data() : nullptr).value();
  o.shape.top_k = static_cast<uint32_t>(1 + random.below(std::min(n_experts, random.chance(90) ? 9u : 64u)));
  const size_t sizes[] = {1, 40, 257, 700};
  o.n_tokens = static_cast<uint32_t>(random.below(sizes[random.below(4)] + 1));
  if (random.chance(40)) o.shape.capacity = static_cast<uint32_t>(1 + random.below(o.n_tokens / 2 + 1));
  const bool hot = random.chance(20);
  for (uint32_t t = 0; t < o.n_tokens; ++t) {
    std::set<int32_t> chosen;
    for (uint32_t k = 0; k < o.shape.top_k; ++k) {
      auto e = static_cast<int32_t>(hot && k == 0 ? 0 : random.below(n_experts));
      while (chosen.count(e) > 0) e = (e + 1) % static_cast<int32_t>(n_experts);
      chosen.insert(e);
      o.index.push_back(random.chance(8) ? -1 : e);
    }
  }
  for (size_t i = 0; i < o.index.size(); ++i) o.weight.push_back(static_cast<float>(i) * 0.25f);
  if (random.chance(40)) o.weight.clear();
  return o;
}

// Launches in the order of exec/cuda/cuda_routing.cc.
class OnDevice {
 public:
  OnDevice(const Own& own, const plan::LevelTree& tree, const algo::CanonicalOrder& order, Random& random)
      : own_(own), tree_(tree), random_(random), expert_(order.expert.begin(), order.expert.end()) {
    const uint32_t n_experts = own.placement.n_experts(), n = own.n_tokens, top_k = own.shape.top_k;
    for (const uint32_t e : expert_) owner_.push_back(own.placement.owner[e]);
    key.assign(size_t{n} * top_k, 77);
    drop_counts.assign(n_experts, 0);
    run_kernel("moeccl_route_order",
               RouteOrderKernelArgs{own.index.data(), order.position.data(), n, top_k, n_experts, key.data(), &bad},
               random);
    if (own.shape.capacity == 0) return;
    RouteKernelArgs lists{};
    lists.topk = own.index.data();
    lists.n_tokens = n;
    lists.top_k = top_k;
    lists.n_experts = n_experts;
    lists.n_tiles = (n + kRouteTile - 1) / kRouteTile;
    std::vector<uint32_t> tile(size_t{lists.n_tiles} * n_experts), first(n_experts + 1), list(key.size());
    lists.tile_count = tile.data();
    lists.first = first.data();
    lists.list = list.data();
    run_kernel("moeccl_route_count", lists, random);
    run_kernel("moeccl_route_scan", lists, random, 1);
    run_kernel("moeccl_route_fill", lists, random);
    run_kernel("moeccl_route_drop",
               RouteDropKernelArgs{first.data(), list.data(), order.position.data(), n_experts, top_k,
                                   own.shape.capacity, key.data(), drop_counts.data()},
               random);
  }

  std::vector<uint32_t> rows_to_groups(const algo::RowWays& ways) {
    std::vector<uint32_t> rows(ways.n_groups, 0);
    run_kernel("moeccl_route_levels",
               RouteLevelsKernelArgs{key.data(),
                                     {owner_.data(), ways.first.data(), ways.hop.data(), ways.group.data()},
                                     own_.n_tokens,
                                     own_.shape.top_k,
                                     ways.n_groups,
                                     ways.dedup ? 1u : 0u,
                                     rows.data()},
               random_);
    return rows;
  }

  void write(const algo::Paths& paths, uint32_t rank) {
    const algo::RowWays of_rank(paths, tree_, own_.placement, rank);
    const uint32_t n = tree_.n_ranks;
    const RouteWays ways{owner_.data(), of_rank.first.data(), of_rank.hop.data(), of_rank.group.data()};
    RouteRecordsKernelArgs a{};
    a.key = key.data();
    a.ways = ways;
    a.expert = expert_.data();
    a.weight = own_.weights();
    a.n_tokens = own_.n_tokens;
    a.top_k = own_.shape.top_k;
    a.n_ranks = n;
    a.n_tiles = (own_.n_tokens + kRecordTile - 1) / kRecordTile;
    std::vector<RouteTotals> tile(size_t{a.n_tiles} * (n + 1));
    total.assign(n + 1, {9, 9, 9, 9});
    a.tile = tile.data();
    a.total = total.data();
    run_kernel("moeccl_route_records_count", a, random_);
    run_kernel("moeccl_route_records_scan", a, random_, 1);
    // Exact sizes, so that the sanitizer notices a word too many.
    const size_t choices = total[n].choices;
    words.assign(total[n].first_word, 0xdeadbeef);
    n_experts.assign(own_.n_tokens, 99);
    expert.assign(choices, 9999);
    choice.assign(choices, 9999);
    weight.assign(own_.weights() != nullptr ? choices : 0, -1.0f);
    a.words = words.data();
    a.own_n_experts = n_experts.data();
    a.own_expert = expert.data();
    a.own_choice = choice.data();
    a.own_weight = weight.data();
    run_kernel("moeccl_route_records_fill", a, random_);
  }

  uint32_t bad = ~0u;
  std::vector<uint32_t> key, words, choice;
  std::vector<int32_t> drop_counts;
  std::vector<RouteTotals> total;
  std::vector<uint8_t> n_experts;
  std::vector<uint16_t> expert;
  std::vector<float> weight;

 private:
  const Own& own_;
  const plan::LevelTree& tree_;
  Random& random_;
  std::vector<uint32_t> expert_, owner_;
};

void expect_alike(const Own& own, const plan::LevelTree& tree, Random& random) {
  const algo::CanonicalOrder order(tree, own.placement);
  algo::OwnChoices want;
  ASSERT_TRUE(want.assign(own.shape, own.placement, order, {own.index.data(), own.weights(), own.n_tokens}).ok());
  OnDevice got(own, tree, order, random);
  ASSERT_EQ(got.bad, ~0u);
  const auto rank = static_cast<uint32_t>(random.below(tree.n_ranks));
  for (const algo::MoeAlgorithm& algorithm : algo::moe_candidates(tree)) {
    SCOPED_TRACE(algorithm.name());
    const algo::Paths paths(algorithm, tree, own.placement);
    got.write(paths, rank);
    EXPECT_EQ(got.n_experts, want.n_experts);
    EXPECT_EQ(got.expert, want.expert);
    EXPECT_EQ(got.choice, want.choice);
    EXPECT_EQ(got.weight, want.weight);
    EXPECT_EQ(got.drop_counts, want.drop_counts);
    const algo::RowWays ways(paths, tree, own.placement, rank);
    for (const algo::RowWays& w : {ways, ways.shared_by_rank(), algo::RowWays::into_experts(own.placement, false)})
      EXPECT_EQ(got.rows_to_groups(w), algo::rows_to_groups(w, own.placement, want));
    algo::RecordWriter writer, adopted;
    writer.write(ways, own.placement, want);
    EXPECT_EQ(got.words, std::vector<uint32_t>(writer.words().begin(), writer.words().end()));
    std::vector<size_t> bytes;
    for (uint32_t r = 0; r < tree.n_ranks; ++r)
      bytes.push_back(algo::message_words(got.total[r].records, got.total[r].choices, got.total[r].weights) * 4);
    EXPECT_EQ(bytes, std::vector<size_t>(writer.bytes().begin(), writer.bytes().end()));
    adopted.adopt(own.placement, want, got.words, bytes);
    for (uint32_t r = 0; r < tree.n_ranks; ++r)
      EXPECT_TRUE(std::ranges::equal(adopted.choices_of(r), writer.choices_of(r))) << "choices of rank " << r;
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(CudaRecords, EqualTheHostsOnEveryTreeAndForEveryAlgorithm) {
  Random random(41);
  for (const test::NamedTree& t : test::moe_trees()) {
    for (int i = 0; i < 5; ++i) {
      SCOPED_TRACE(t.name + std::string(", shape ") + std::to_string(i));
      expect_alike(draw(t.tree, random), t.tree, random);
      if (HasFailure()) return;
    }
  }
}

TEST(CudaRecords, GroupsBeyondABlocksCountersAreCounted) {
  Random random(42);
  const plan::LevelTree tree = plan::LevelTree::flat(kLevelSlots + 60);
  for (int i = 0; i < 2; ++i) {
    Own own = draw(tree, random);
    own.shape.capacity = 0;
    expect_alike(own, tree, random);
  }
}

TEST(CudaRecords, NameTheFirstTokenWithABadChoice) {
  Random random(43);
  const plan::LevelTree tree = plan::LevelTree::flat(4);
  int seen = 0;
  for (int i = 0; i < 60; ++i) {
    Own own = draw(tree, random);
    if (own.n_tokens < 2 || own.shape.top_k < 2) continue;
    ++seen;
    const auto token = static_cast<uint32_t>(random.below(own.n_tokens));
    int32_t* choices = &own.index[size_t{token} * own.shape.top_k];
    if (i % 3 == 0) choices[0] = static_cast<int32_t>(own.placement.n_experts());
    if (i % 3 == 1) choices[1] = -2;
    if (i % 3 == 2) choices[0] = choices[1] = 0;
    const algo::CanonicalOrder order(tree, own.placement);
    const OnDevice got(own, tree, order, random);
    ASSERT_EQ(got.bad, token);
    algo::OwnChoices host;
    const Status want = host.assign(own.shape, own.placement, order, {own.index.data(), own.weights(), own.n_tokens});
    const Status said = algo::check_choices(order, {choices, own.shape.top_k}, token);
    EXPECT_EQ(said.message(), want.message());
    EXPECT_FALSE(said.ok());
  }
  EXPECT_GE(seen, 10);
}

}  // namespace
}  // namespace moeccl::cuda
