// SPDX-License-Identifier: Apache-2.0
// A routing's tables that kernels make from all ranks' choices, compared list by list with algo::RoutingTables, which
// makes them from records: random routings on every tree, with every algorithm.
#include "src/exec/cuda/tables/table_plan.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/support/moe_cluster.h"
#include "tests/unit/cuda_kernels/harness.h"

namespace moeccl::cuda {
namespace {

// One rank's device memory, and its plan.
struct RankOnDevice {
  std::unique_ptr<exec::TablePlan> plan;
  std::vector<uint64_t> image;
  WalkTables head{};
  TableCounts counts{};
  std::vector<int64_t> expert_offsets;
  std::vector<int32_t> expert_counts;
  TablesKernelArgs args{};
  std::byte* base() { return reinterpret_cast<std::byte*>(image.data()); }
};

// Launches as src/exec/cuda/tables/cuda_tables.cc does, for all ranks of a cluster.
class OnDevice {
 public:
  OnDevice(const test::MoeCluster& cluster, Random& random) : c_(cluster), random_(random), ranks_(cluster.n()) {
    for (uint32_t r = 0; r < c_.n(); ++r) orders_.emplace_back(c_.test_case.tree, c_.seen[r]);
    for (uint32_t r = 0; r < c_.n(); ++r) {
      RankOnDevice& m = ranks_[r];
      m.plan = std::make_unique<exec::TablePlan>(
          exec::TablePlan::Layer{c_.paths.get(), &c_.rank_paths[r], &c_.placement, c_.domains.get(), &orders_[r],
                                 &c_.test_case.shape, c_.slot_rows_, c_.tables[r].n_chunks()});
      m.image.assign((m.plan->bytes() + 7) / 8, 0xcdcdcdcdcdcdcdcdull);  // a kernel must not rely on this
      std::memcpy(m.base(), m.plan->constants().data(), m.plan->constants().size());
      m.expert_offsets.assign(c_.seen[r].n_local(r) + 1, -7);
      m.expert_counts.assign(c_.seen[r].n_local(r), -7);
    }
  }
  RankOnDevice& rank(uint32_t r) { return ranks_[r]; }

  // Sets the choices of rank r, in an array of most_tokens rows of which the device counts `tokens`.
  void give(uint32_t r, const std::vector<int32_t>& index, const std::vector<float>& weight, uint64_t tokens,
            uint64_t most_tokens) {
    RankOnDevice& m = ranks_[r];
    const uint32_t top_k = c_.test_case.shape.top_k;
    std::vector<int32_t> rows(most_tokens * top_k, 12345);
    std::vector<float> weights(most_tokens * top_k + 1, 6.5f);  // not null without tokens
    std::copy(index.begin(), index.end(), rows.begin());
    std::copy(weight.begin(), weight.end(), weights.begin());
    TableOwnKernelArgs own = m.plan->own(m.base());
    own.topk = rows.data();
    own.weight = c_.test_case.weighted ? weights.data() : nullptr;
    own.n_tokens = tokens == most_tokens && random_.chance(50) ? nullptr : &tokens;
    own.most_tokens = most_tokens;
    const auto n = static_cast<uint32_t>(most_tokens);
    run_kernel("moeccl_table_take", own, random_);
    run_kernel("moeccl_route_order", m.plan->order(m.base(), n), random_);
    if (c_.test_case.shape.capacity > 0) {
      const RouteKernelArgs lists = m.plan->lists(m.base(), n);
      run_kernel("moeccl_route_count", lists, random_);
      run_kernel("moeccl_route_scan", lists, random_, 1);
      run_kernel("moeccl_route_fill", lists, random_);
      run_kernel("moeccl_route_drop", m.plan->drop(m.base()), random_);
    }
    run_kernel("moeccl_table_pack", own, random_);
  }
  void gather_blocks() {
    for (RankOnDevice& to : ranks_)
      for (uint32_t r = 0; r < c_.n(); ++r)
        std::memcpy(to.plan->blocks(to.base()) + r * to.plan->block_bytes(),
                    ranks_[r].plan->own_block(ranks_[r].base()), to.plan->block_bytes());
  }
  void make(uint32_t r) {
    RankOnDevice& m = ranks_[r];
    m.args = m.plan->tables(m.base());
    m.args.weighted = c_.test_case.weighted ? 1 : 0;
    m.args.head = &m.head;
    m.args.counts = &m.counts;
    m.args.expert_offsets = m.expert_offsets.data();
    m.args.expert_counts = m.expert_counts.data();
    for (const char* kernel : {"moeccl_table_count", "moeccl_table_scan", "moeccl_table_blocks", "moeccl_table_fill"})
      run_kernel(kernel, m.args, random_);
  }

 private:
  const test::MoeCluster& c_;
  Random& random_;
  std::vector<algo::CanonicalOrder> orders_;
  std::vector<RankOnDevice> ranks_;
};

void expect_rows(const WalkRowBlock& got, const plan::RowBlock& want) {
  ASSERT_EQ(got.count, want.count);
  if (want.count == 0) return;
  for (uint64_t i = 0; i < want.count; ++i) {
    ASSERT_EQ(got.src_index[i], want.src_index[i]) << "row " << i;
    if (want.dst_index != nullptr) {
      ASSERT_EQ(got.dst_index[i], want.dst_index[i]) << "row " << i;
    }
    if (want.weights != nullptr) {
      ASSERT_EQ(got.weights[i], want.weights[i]) << "row " << i;
    }
  }
  ASSERT_EQ(got.dst_index == nullptr, want.dst_index == nullptr);
  ASSERT_EQ(got.weights == nullptr, want.weights == nullptr);
  if (want.dst_index == nullptr) {
    ASSERT_EQ(got.dst_first, want.dst_first);
  }
}

void expect_sums(const WalkSumBlock& got, const plan::SumBlock& want) {
  ASSERT_EQ(got.count, want.count);
  if (want.count == 0) return;
  ASSERT_EQ(got.dst_first, want.dst_first);
  ASSERT_EQ(got.dst_index == nullptr, want.dst_index == nullptr);
  for (uint64_t i = 0; i < want.count; ++i) {
    if (want.dst_index != nullptr) {
      ASSERT_EQ(got.dst_index[i], want.dst_index[i]) << "sum " << i;
    }
    const uint64_t n = want.offsets[i + 1] - want.offsets[i];
    ASSERT_EQ(got.offsets[i + 1] - got.offsets[i], n) << "sum " << i;
    for (uint64_t t = 0; t < n; ++t) {
      const plan::RowTermRef& w = want.terms[want.offsets[i] + t];
      const RowTermBits& g = got.terms[got.offsets[i] + t];
      ASSERT_EQ(g.row, w.row) << "sum " << i << ", term " << t;
      ASSERT_EQ(g.segment, w.segment) << "sum " << i << ", term " << t;
      ASSERT_EQ(g.close, w.close) << "sum " << i << ", term " << t;
      if (want.weights != nullptr) {
        ASSERT_EQ(got.weights[got.offsets[i] + t], want.weights[want.offsets[i] + t]);
      }
    }
  }
}

void expect_tables(const RankOnDevice& got, const algo::RoutingTables& want, uint64_t n_tokens) {
  const uint32_t n_chunks = want.n_chunks();
  ASSERT_EQ(got.head.ready, 1u) << "fault " << got.head.fault << " of rank " << got.head.fault_rank << ", "
                                << got.head.fault_value;
  ASSERT_EQ(got.head.n_chunks, n_chunks);
  const auto rows = want.dispatch_rows(true);
  const auto sums = want.combine_sums(true), zeros = want.dispatch_sums();
  for (size_t i = 0; i < rows.size(); ++i) {
    SCOPED_TRACE("rows, list " + std::to_string(i / n_chunks) + ", chunk " + std::to_string(i % n_chunks));
    ASSERT_NO_FATAL_FAILURE(expect_rows(got.head.rows[i], rows[i]));
  }
  for (size_t i = 0; i < sums.size(); ++i) {
    SCOPED_TRACE("sums, list " + std::to_string(i / n_chunks) + ", chunk " + std::to_string(i % n_chunks));
    ASSERT_NO_FATAL_FAILURE(expect_sums(got.head.sums[i], sums[i]));
  }
  for (size_t i = 0; i < zeros.size(); ++i) ASSERT_NO_FATAL_FAILURE(expect_sums(got.head.zeros[i], zeros[i]));
  EXPECT_EQ(got.counts.n_tokens, n_tokens);
  EXPECT_EQ(got.counts.n_rows, want.n_rows());
  EXPECT_EQ(got.counts.n_unique, want.n_unique());
  EXPECT_EQ(got.expert_counts, want.expert_counts);
  if (want.expert_major()) {
    EXPECT_EQ(got.expert_offsets, want.expert_offsets);
  }
}

void expect_equal(const test::MoeCluster& cluster, Random& random) {
  const test::MoeCase& moe = cluster.test_case;
  OnDevice device(cluster, random);
  for (uint32_t r = 0; r < cluster.n(); ++r)
    device.give(r, cluster.index[r], cluster.weight[r], moe.tokens[r], moe.shape.max_tokens);
  device.gather_blocks();
  for (uint32_t r = 0; r < cluster.n(); ++r) {
    SCOPED_TRACE("rank " + std::to_string(r));
    device.make(r);
    expect_tables(device.rank(r), cluster.tables[r], moe.tokens[r]);
  }
}

test::MoeCase draw_case(const plan::LevelTree& tree, test::Random& draw, Random& random) {
  test::MoeCase moe = test::random_case(tree, draw);
  moe.shape.capacity = random.chance(30) ? static_cast<uint32_t>(1 + random.below(4)) : 0;
  moe.shape.grouped = random.chance(40) && algo::check_groups(tree).ok();
  if (random.chance(10)) moe.hot_experts = 1;
  return moe;
}

TEST(CudaTables, EqualTheHostsOnEveryTreeAndForEveryAlgorithm) {
  Random random(51);
  for (const test::NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 4; ++round) {
      const auto seed = static_cast<uint32_t>(random.bits());
      test::Random draw(seed);
      test::MoeCluster cluster(draw_case(t.tree, draw, random), seed);
      const auto algorithms = algo::moe_candidates(t.tree);
      const algo::MoeAlgorithm algorithm = algorithms[random.below(algorithms.size())];
      cluster.route(algorithm, 0);
      const algo::MoeShape& shape = cluster.test_case.shape;
      if (random.chance(60)) {
        // Slots that hold less than everything, so that there are several chunks.
        const uint64_t least = algorithm.dedup() ? 1 : uint64_t{t.tree.n_ranks} * shape.top_k;
        cluster.route(algorithm, std::max(least, cluster.slot_rows_ / (1 + random.below(6))));
      }
      if (HasFatalFailure()) return;
      SCOPED_TRACE(t.name + std::string(", round ") + std::to_string(round) + ", " + algorithm.name());
      OnDevice device(cluster, random);
      for (uint32_t r = 0; r < cluster.n(); ++r)
        device.give(r, cluster.index[r], cluster.weight[r], cluster.test_case.tokens[r],
                    random.chance(50) ? shape.max_tokens : cluster.test_case.tokens[r]);
      device.gather_blocks();
      const uint32_t any = exec::TablePlan::n_chunks_of(shape, *cluster.paths, cluster.slot_rows_);
      for (uint32_t r = 0; r < cluster.n(); ++r) {
        SCOPED_TRACE("rank " + std::to_string(r));
        device.make(r);
        expect_tables(device.rank(r), cluster.tables[r], cluster.test_case.tokens[r]);
        uint64_t needed = 0;
        EXPECT_LE(cluster.tables[r].min_chunks(cluster.slot_rows_, &needed), any) << "chunks for any routing";
        if (HasFailure()) return;
      }
    }
  }
}

TEST(CudaTables, WithExpertDomainsEachOriginsViewCounts) {
  Random random(52);
  const plan::LevelTree tree = test::tree_of({{"node", {}, {4, 3}}});
  for (int round = 0; round < 20; ++round) {
    const auto seed = static_cast<uint32_t>(random.bits());
    test::Random draw(seed);
    test::MoeCase moe = draw_case(tree, draw, random);
    moe.domain = {1 + static_cast<uint32_t>(random.below(2)), 1 + static_cast<uint32_t>(random.below(3))};
    test::MoeCluster cluster(moe, seed);
    cluster.route({algo::PathKind::kHier, 1 + static_cast<uint32_t>(random.below(2))}, 0);
    if (HasFatalFailure()) return;
    SCOPED_TRACE("round " + std::to_string(round));
    expect_equal(cluster, random);
    if (HasFailure()) return;
  }
}

// A warp takes several tokens at once, or several rounds for one token with more choices than lanes.
TEST(CudaTables, TokensOfAnyNumberOfChoicesEqualTheHosts) {
  Random random(54);
  const plan::LevelTree tree = test::tree_of({{"node", {}, {2, 2}}});
  for (const uint32_t top_k : {1u, 3u, 17u, 31u, 32u, 33u, 64u}) {
    for (const algo::MoeAlgorithm& algorithm : algo::moe_candidates(tree)) {
      const auto seed = static_cast<uint32_t>(random.bits());
      test::Random draw(seed);
      test::MoeCase moe = draw_case(tree, draw, random);
      moe.n_experts = top_k + static_cast<uint32_t>(random.below(9));
      moe.owner.clear();
      moe.shape.top_k = top_k;
      moe.hot_experts = 0;
      test::MoeCluster cluster(moe, seed);
      cluster.route(algorithm, 0);
      if (HasFatalFailure()) return;
      SCOPED_TRACE(std::to_string(top_k) + " choices, " + algorithm.name());
      expect_equal(cluster, random);
      if (HasFailure()) return;
    }
  }
}

// A wrong choice on one rank empties the tables of all ranks, with the reason.
TEST(CudaTables, AWrongChoiceEmptiesEveryRanksTables) {
  Random random(53);
  test::Random draw(3);
  test::MoeCase moe = test::random_case(plan::LevelTree::flat(3), draw);
  moe.n_experts = 6, moe.owner.clear(), moe.shape.top_k = 2, moe.weighted = true;
  moe.tokens = {5, 5, 5}, moe.shape.max_tokens = 5;
  test::MoeCluster cluster(moe, 3);
  cluster.route({algo::PathKind::kFlat, 1}, 0);
  const auto fault_of = [&](TableFault fault) {
    OnDevice device(cluster, random);
    for (uint32_t r = 0; r < 3; ++r) {
      std::vector<int32_t> index = cluster.index[r];
      if (r == 1 && fault == TableFault::kChoices) index[2 * 2] = 6;
      if (r == 1 && fault == TableFault::kTokens)
        device.give(r, {0, 1, 2, 3}, {1, 1, 1, 1}, 9, 2);
      else
        device.give(r, index, cluster.weight[r], 5, 5);
      if (r == 1 && fault == TableFault::kWeights)
        reinterpret_cast<TableBlock*>(device.rank(r).plan->own_block(device.rank(r).base()))->weighted = 0;
    }
    device.gather_blocks();
    for (uint32_t r = 0; r < 3; ++r) {
      device.make(r);
      const WalkTables& head = device.rank(r).head;
      EXPECT_EQ(head.ready, 0u);
      EXPECT_EQ(head.fault, static_cast<uint32_t>(fault));
      EXPECT_EQ(head.fault_rank, 1u);
      if (fault == TableFault::kChoices) {
        EXPECT_EQ(head.fault_value, 2u);
      }
      if (fault == TableFault::kTokens) {
        EXPECT_EQ(head.fault_value, 9u);
      }
    }
  };
  fault_of(TableFault::kChoices);
  fault_of(TableFault::kTokens);
  fault_of(TableFault::kWeights);
}

}  // namespace
}  // namespace moeccl::cuda
