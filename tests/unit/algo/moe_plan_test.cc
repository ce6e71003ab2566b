// SPDX-License-Identifier: Apache-2.0
#include "src/algo/moe_plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <span>
#include <tuple>

#include "src/plan/checker.h"
#include "tests/support/interpreter.h"
#include "tests/support/moe_cluster.h"

namespace moeccl {
namespace {

using algo::MoeAlgorithm;
using algo::PathKind;
using test::MoeCase;
using test::MoeCluster;
using test::NamedTree;
using test::Random;
using test::random_case;

// Returns slots that force several chunks, but never less than a chunk needs.
uint64_t tight_slot(const MoeCase& c, const algo::Paths& paths, Random& random) {
  const uint64_t least = paths.algorithm().dedup() ? 1 : paths.max_origins() * c.shape.top_k;
  return least + random() % 8;
}

void route_tight(MoeCluster& cluster, const MoeAlgorithm& a, Random& random) {
  const algo::Paths paths(a, cluster.test_case.tree, cluster.placement);
  cluster.route(a, tight_slot(cluster.test_case, paths, random));
}

// --- Proofs -------------------------------------------------------------------------------------------------------

plan::RowExpectation expect_dispatch(const MoeCluster& c, bool weighted) {
  plan::RowExpectation expected;
  for (uint32_t r = 0; r < c.n(); ++r) {
    expected.input_rows.push_back(c.test_case.tokens[r]);
    const algo::RoutingTables& t = c.tables[r];
    std::vector<plan::ExpectedRow>& rows = expected.output.emplace_back(t.n_rows());
    for (uint64_t i = 0; i < t.n_rows(); ++i) {
      if (t.row_source[i] < 0) continue;  // padding: zeros
      rows[i].terms.push_back({static_cast<uint32_t>(t.row_source[i]), static_cast<uint32_t>(t.row_token[i]),
                               weighted ? t.choice_weight[i] : 1.0f});
    }
  }
  return expected;
}

plan::RowExpectation expect_combine(const MoeCluster& c, bool weighted) {
  plan::RowExpectation expected;
  for (uint32_t r = 0; r < c.n(); ++r) {
    expected.input_rows.push_back(c.tables[r].n_rows());
    expected.output.emplace_back(c.test_case.tokens[r]);
  }
  for (uint32_t r = 0; r < c.n(); ++r) {
    const algo::RoutingTables& t = c.tables[r];
    for (uint32_t i = 0; i < t.n_rows(); ++i) {
      if (t.row_source[i] < 0) continue;
      expected.output[static_cast<size_t>(t.row_source[i])][static_cast<size_t>(t.row_token[i])].terms.push_back(
          {r, i, weighted ? t.choice_weight[i] : 1.0f});
    }
  }
  return expected;
}

// In the Rows layout without dedup, copies arrive that no rank reads. The checker calls this waste, and it is (Tutel's
// 2DH).
bool wasteful(const MoeCluster& cluster, moecclOp_t op) {
  return op == moecclOpDispatch && !cluster.paths->algorithm().dedup() && !cluster.test_case.shape.expert_major;
}

void prove(const MoeCluster& cluster, moecclOp_t op, bool weighted, bool batched = false) {
  const plan::Plan plan = cluster.plan(op, batched);
  const std::vector<plan::Binding> bindings = cluster.bindings(op, weighted);
  const plan::RowExpectation rows =
      op == moecclOpDispatch ? expect_dispatch(cluster, weighted) : expect_combine(cluster, weighted);
  const Status status = plan::check({plan, bindings, &rows, nullptr, wasteful(cluster, op)});
  EXPECT_TRUE(status.ok()) << (op == moecclOpDispatch ? "dispatch" : "combine") << (batched ? ", batched: " : ": ")
                           << status.message();
  if (!batched) prove(cluster, op, weighted, true);
}

TEST(MoePlanTest, ProvedForRandomRoutingsOnEveryTree) {
  Random random(21);
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 4; ++round) {
      MoeCase c = random_case(t.tree, random);
      c.shape.grouped = random() % 2 == 0;
      MoeCluster cluster(c, random());
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        route_tight(cluster, a, random);
        SCOPED_TRACE(format("{} ranks {} {} {} chunks, round {}", t.name, t.tree.n_ranks, a.name(),
                            cluster.tables[0].n_chunks(), round));
        const bool weights = c.weighted && c.shape.expert_major;
        prove(cluster, moecclOpDispatch, weights && round % 2 == 0);
        prove(cluster, moecclOpCombine, weights && round % 2 == 1);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(MoePlanTest, ProvedWithExpertDomainsOnEveryTree) {
  Random random(23);
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 6; ++round) {
      MoeCase c = random_case(t.tree, random);
      c.shape.grouped = random() % 2 == 0;
      for (uint32_t l = 0; l < t.tree.depth(); ++l) c.domain.push_back(1 + random() % 5);
      MoeCluster cluster(c, random());
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        if (a.kind == PathKind::k2dh) continue;
        const algo::Paths paths(a, t.tree, cluster.placement, cluster.domains.get());
        cluster.route(a, tight_slot(c, paths, random));
        SCOPED_TRACE(format("{} ranks {} {} {} chunks, round {}", t.name, t.tree.n_ranks, a.name(),
                            cluster.tables[0].n_chunks(), round));
        const bool weights = c.weighted && c.shape.expert_major;
        prove(cluster, moecclOpDispatch, weights && round % 2 == 0);
        prove(cluster, moecclOpCombine, weights && round % 2 == 1);
        if (HasFailure()) return;
      }
    }
  }
}

TEST(MoePlanTest, ProvedForEveryCountOfRanks) {
  Random random(22);
  for (uint32_t n = 1; n <= 16; ++n) {
    const plan::LevelTree trees[] = {plan::LevelTree::flat(n), test::tree_of({{"node", {}, {(n + 1) / 2, n / 2 + 1}}})};
    for (const plan::LevelTree& tree : trees) {
      MoeCluster cluster(random_case(tree, random), random());
      for (const MoeAlgorithm& a : algo::moe_candidates(tree)) {
        route_tight(cluster, a, random);
        SCOPED_TRACE(format("{} ranks, {} levels, {}", tree.n_ranks, tree.depth(), a.name()));
        prove(cluster, moecclOpDispatch, false);
        prove(cluster, moecclOpCombine, false);
      }
    }
  }
}

TEST(MoePlanTest, ProvedForNoTokensAndForOneExpertTakingAll) {
  for (const NamedTree& t : test::moe_trees()) {
    for (const bool empty : {true, false}) {
      MoeCase c;
      c.tree = t.tree;
      c.shape.row_bytes = 32;
      c.shape.top_k = 1;
      c.none = 0;
      c.hot_experts = 1;
      c.tokens.assign(t.tree.n_ranks, empty ? 0 : 9);
      c.shape.max_tokens = 9;
      MoeCluster cluster(c, 1);
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        SCOPED_TRACE(format("{} ranks {} {}", t.name, t.tree.n_ranks, a.name()));
        cluster.route(a, cluster.n());
        prove(cluster, moecclOpDispatch, false);
        prove(cluster, moecclOpCombine, false);
      }
    }
  }
}

// Guards the proofs above: the checker must refuse a plan that reads before it waits or writes before a slot is free.
TEST(MoePlanTest, BrokenPlansAreNotProved) {
  MoeCase c;
  c.tree = test::tree_of({{"node", {}, {4, 4}}});
  c.n_experts = 32;
  c.shape = {.top_k = 4, .row_bytes = 32, .max_tokens = 64};
  c.tokens.assign(8, 64);
  MoeCluster cluster(c, 3);
  cluster.route({PathKind::kHier, 2}, 8);
  ASSERT_GT(cluster.tables[0].n_chunks(), 4u);
  for (const moecclOp_t op : {moecclOpDispatch, moecclOpCombine}) {
    const plan::RowExpectation rows =
        op == moecclOpDispatch ? expect_dispatch(cluster, false) : expect_combine(cluster, false);
    const std::vector<plan::Binding> bindings = cluster.bindings(op, false);
    plan::Plan good = cluster.plan(op);
    ASSERT_TRUE(plan::check({good, bindings, &rows}).ok());
    size_t broken = 0;
    for (size_t lane = 0; lane < good.programs[1].lanes.size(); ++lane) {
      const std::vector<plan::Step>& steps = good.programs[1].lanes[lane].steps;
      for (size_t i = 0; i + 1 < steps.size(); ++i) {
        const bool moves_next =
            steps[i + 1].kind != plan::StepKind::kWait && steps[i + 1].kind != plan::StepKind::kSignal;
        if (steps[i].kind != plan::StepKind::kWait || !moves_next) continue;
        plan::Plan bad = good;
        plan::Step* at = &bad.programs[1].lanes[lane].steps[i];
        if (at->lag > 0)
          ++at->lag;
        else
          std::swap(at[0], at[1]);
        bad.programs[1].finalize();
        EXPECT_FALSE(plan::check({bad, bindings, &rows}).ok()) << "lane " << lane << " step " << i;
        ++broken;
      }
    }
    EXPECT_GT(broken, 4u);
  }
}

// --- Values -------------------------------------------------------------------------------------------------------

using Rows = std::vector<std::vector<float>>;  // [n_ranks] rows of 8 floats
constexpr size_t kWidth = 8;

Rows random_rows(const std::vector<uint64_t>& n_rows, Random& random) {
  Rows rows;
  for (const uint64_t n : n_rows) {
    std::vector<float>& r = rows.emplace_back(n * kWidth);
    for (float& v : r) v = static_cast<float>(random.unit() - 0.5);
  }
  return rows;
}

std::vector<uint64_t> expert_rows(const MoeCluster& c) {
  std::vector<uint64_t> n;
  for (const algo::RoutingTables& t : c.tables) n.push_back(t.n_rows());
  return n;
}

Rows run(const MoeCluster& c, moecclOp_t op, bool weighted, const Rows& in, uint32_t seed) {
  const plan::Plan plan = c.plan(op);
  const std::vector<plan::Binding> bindings = c.bindings(op, weighted);
  Rows out;
  std::vector<test::RankBuffers> buffers;
  for (uint32_t r = 0; r < c.n(); ++r) {
    const uint64_t n = op == moecclOpDispatch ? c.tables[r].n_rows() : c.test_case.tokens[r];
    out.emplace_back(n * kWidth, -777.0f);
  }
  for (uint32_t r = 0; r < c.n(); ++r)
    buffers.push_back({reinterpret_cast<const std::byte*>(in[r].data()), reinterpret_cast<std::byte*>(out[r].data())});
  test::Interpreter interpreter(plan.programs, bindings, buffers, moecclFloat32, c.test_case.shape.grouped);
  EXPECT_TRUE(interpreter.run(seed));
  return out;
}

Rows naive_dispatch(const MoeCluster& c, bool weighted, const Rows& in) {
  Rows out;
  for (uint32_t r = 0; r < c.n(); ++r) {
    const algo::RoutingTables& t = c.tables[r];
    std::vector<float>& rows = out.emplace_back(t.n_rows() * kWidth, 0.0f);
    for (uint64_t i = 0; i < t.n_rows(); ++i) {
      if (t.row_source[i] < 0) continue;
      const std::vector<float>& source = in[static_cast<size_t>(t.row_source[i])];
      for (size_t j = 0; j < kWidth; ++j)
        rows[i * kWidth + j] =
            (weighted ? t.choice_weight[i] : 1.0f) * source[static_cast<size_t>(t.row_token[i]) * kWidth + j];
    }
  }
  return out;
}

void expect_combined(const MoeCluster& c, bool weighted, const Rows& in, const Rows& out) {
  std::vector<std::vector<double>> sums;
  for (const uint64_t tokens : c.test_case.tokens) sums.emplace_back(tokens * kWidth, 0.0);
  for (uint32_t r = 0; r < c.n(); ++r) {
    const algo::RoutingTables& t = c.tables[r];
    for (uint64_t i = 0; i < t.n_rows(); ++i)
      for (size_t j = 0; j < kWidth && t.row_source[i] >= 0; ++j)
        sums[static_cast<size_t>(t.row_source[i])][static_cast<size_t>(t.row_token[i]) * kWidth + j] +=
            static_cast<double>(weighted ? t.choice_weight[i] : 1.0f) * static_cast<double>(in[r][i * kWidth + j]);
  }
  for (uint32_t r = 0; r < c.n(); ++r)
    for (size_t i = 0; i < out[r].size(); ++i)
      ASSERT_NEAR(out[r][i], sums[r][i], 1e-5) << "rank " << r << " token " << i / kWidth;
}

TEST(MoePlanTest, RealBytesAgreeWithTheNaiveReference) {
  Random random(23);
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 6; ++round) {
      MoeCase c = random_case(t.tree, random);
      c.shape.grouped = round % 2 == 1;
      MoeCluster cluster(c, random());
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        route_tight(cluster, a, random);
        SCOPED_TRACE(format("{} ranks {} {}, round {}", t.name, t.tree.n_ranks, a.name(), round));
        const bool weights = c.weighted && c.shape.expert_major;
        for (const bool weighted : {false, true}) {
          const Rows tokens = random_rows(c.tokens, random);
          ASSERT_EQ(run(cluster, moecclOpDispatch, weighted, tokens, random()),
                    naive_dispatch(cluster, weighted && weights, tokens));
          const Rows experts = random_rows(expert_rows(cluster), random);
          expect_combined(cluster, weighted && weights, experts,
                          run(cluster, moecclOpCombine, weighted, experts, random()));
        }
        if (HasFatalFailure()) return;
      }
    }
  }
}

// <dispatch(x), y> = <x, combine without weights(y)>: backward is the transpose.
TEST(MoePlanTest, BackwardIsTheTransposeOfForward) {
  Random random(24);
  for (const NamedTree& t : test::moe_trees()) {
    MoeCase c = random_case(t.tree, random);
    MoeCluster cluster(c, random());
    for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
      route_tight(cluster, a, random);
      for (const bool weighted : {false, true}) {
        const Rows x = random_rows(c.tokens, random), y = random_rows(expert_rows(cluster), random);
        const Rows forward = run(cluster, moecclOpDispatch, weighted, x, random());
        const Rows backward = run(cluster, moecclOpCombine, weighted, y, random());
        double left = 0, right = 0;
        for (uint32_t r = 0; r < cluster.n(); ++r) {
          for (size_t i = 0; i < y[r].size(); ++i)
            left += static_cast<double>(forward[r][i]) * static_cast<double>(y[r][i]);
          for (size_t i = 0; i < x[r].size(); ++i)
            right += static_cast<double>(backward[r][i]) * static_cast<double>(x[r][i]);
        }
        EXPECT_NEAR(left, right, 1e-2 * std::max(1.0, std::abs(left))) << a.name();
      }
    }
  }
}

TEST(MoePlanTest, DeterministicCombineHasTheSameBitsUnderEveryAlgorithm) {
  Random random(25);
  int different_when_not_grouped = 0;
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 4; ++round) {
      MoeCase c = random_case(t.tree, random);
      c.n_experts = 4 * t.tree.n_ranks;
      c.owner.clear();
      c.shape.top_k = std::min(c.n_experts, 8u);
      for (const bool grouped : {true, false}) {
        c.shape.grouped = grouped;
        MoeCluster cluster(c, 77u + static_cast<uint32_t>(round));
        Rows first, experts;
        for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
          route_tight(cluster, a, random);
          if (experts.empty()) experts = random_rows(expert_rows(cluster), random);
          const Rows out = run(cluster, moecclOpCombine, true, experts, random());
          if (first.empty()) first = out;
          if (grouped)
            ASSERT_EQ(out, first) << t.name << " " << a.name();
          else
            different_when_not_grouped += out != first;
        }
      }
    }
  }
  EXPECT_GT(different_when_not_grouped, 0) << "the test would not see a difference";
}

// Returns combine's sums to the bit if each token's rows are added in the order of its choices, a rank's row in layout
// Rows at the last of them.
Rows sums_by_choice(const MoeCluster& c, const Rows& in) {
  const uint32_t top_k = c.test_case.shape.top_k;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, size_t> row_of;  // (origin, token, expert or owner)
  for (const algo::RoutingTables& t : c.tables) {
    const auto r = static_cast<uint32_t>(&t - c.tables.data());
    for (size_t i = 0, e = 0; i < t.n_rows(); ++i) {
      while (t.expert_major() && static_cast<int64_t>(i) >= t.expert_offsets[e + 1]) ++e;
      const uint32_t key = t.expert_major() ? static_cast<uint32_t>(t.local_experts[e]) : r;
      if (t.row_source[i] >= 0)
        row_of[{static_cast<uint32_t>(t.row_source[i]), static_cast<uint32_t>(t.row_token[i]), key}] = i;
    }
  }
  Rows out;
  for (uint32_t r = 0; r < c.n(); ++r) {
    std::vector<float>& sums = out.emplace_back(c.test_case.tokens[r] * kWidth, 0.0f);
    for (uint32_t t = 0; t < c.test_case.tokens[r]; ++t) {
      const std::span<const int32_t> choices(c.index[r].data() + size_t{t} * top_k, top_k);
      for (auto k = choices.begin(); k != choices.end(); ++k) {
        if (*k < 0) continue;
        const uint32_t expert = static_cast<uint32_t>(*k), owner = c.placement.owner[expert];
        const bool again = std::any_of(k + 1, choices.end(), [&](int32_t later) {
          return later >= 0 && c.placement.owner[static_cast<uint32_t>(later)] == owner;
        });
        if (again && !c.test_case.shape.expert_major) continue;
        const size_t row = row_of.at({r, t, c.test_case.shape.expert_major ? expert : owner});
        for (size_t j = 0; j < kWidth; ++j) sums[t * kWidth + j] += in[owner][row * kWidth + j];
      }
    }
  }
  return out;
}

TEST(MoePlanTest, SumsByChoiceAreInTheOrderOfChoices) {
  Random random(26);
  int different_from_flat = 0;
  for (const NamedTree& t : test::moe_trees()) {
    for (int round = 0; round < 6; ++round) {
      MoeCase c = random_case(t.tree, random);
      const uint32_t seed = random();
      MoeCluster flat(c, seed);
      c.shape.by_choice = true;
      MoeCluster cluster(c, seed);
      SCOPED_TRACE(format("{} ranks {}, round {}", t.name, t.tree.n_ranks, round));
      for (MoeCluster* each : {&flat, &cluster}) each->route({PathKind::kFlat, 1}, 0);
      const Rows experts = random_rows(expert_rows(cluster), random);
      const Rows out = run(cluster, moecclOpCombine, false, experts, random());
      ASSERT_EQ(out, sums_by_choice(cluster, experts));
      different_from_flat += out != run(flat, moecclOpCombine, false, experts, random());
      expect_combined(cluster, c.weighted && c.shape.expert_major, experts,
                      run(cluster, moecclOpCombine, true, experts, random()));
      prove(cluster, moecclOpCombine, c.weighted && c.shape.expert_major);
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(different_from_flat, 0) << "the test would not see a difference";
}

TEST(MoePlanTest, SlotsFollowTheBudget) {
  const plan::LevelTree tree = test::tree_of({{"node", {}, {4, 4}}});
  const algo::Placement placement = algo::Placement::make(64, 8, nullptr).value();
  const algo::Paths paths({PathKind::kHier, 2}, tree, placement);
  algo::MoeShape shape;
  shape.row_bytes = 1000;
  shape.max_tokens = 100000;
  for (const uint64_t budget : {uint64_t{0}, uint64_t{20000}, uint64_t{1} << 20, uint64_t{1} << 30}) {
    const uint64_t rows = algo::moe_slot_rows(shape, paths, budget);
    EXPECT_LE(algo::moe_staging_bytes(shape, algo::moe_plan_shape(paths, false, rows), rows), budget);
  }
  shape.max_tokens = 10;
  EXPECT_LE(algo::moe_slot_rows(shape, paths, uint64_t{1} << 30), 48u);
}

}  // namespace
}  // namespace moeccl
