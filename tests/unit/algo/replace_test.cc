// SPDX-License-Identifier: Apache-2.0
#include "src/routing/replace.h"

#include <numeric>

#include "src/algo/moe_plan.h"
#include "src/plan/checker.h"
#include "src/solve/sample.h"
#include "tests/support/interpreter.h"
#include "tests/support/moe_cluster.h"

namespace moeccl {
namespace {

using algo::MoeAlgorithm;
using algo::PathKind;
using algo::Residents;
using test::MoeCase;
using test::MoeCluster;
using test::Random;

constexpr uint64_t kSample = 3;
constexpr size_t kWidth = 8;  // floats of a row
using Rows = std::vector<std::vector<float>>;

// A plain routing of whole samples, and the same tokens at their new homes.
class Replaced {
 public:
  Replaced(MoeCluster& plain, MoeAlgorithm algorithm, Residents residents, uint64_t slot_rows)
      : plain_(plain),
        residents_(residents),
        placement(residents != Residents::kNone ? algo::with_residents(plain.placement) : plain.placement),
        paths(algorithm, plain.test_case.tree, placement),
        samples(algo::Samples::make(kSample, plain.test_case.tokens).value()) {
    const MoeCase& c = plain.test_case;
    const uint64_t most = *std::max_element(c.tokens.begin(), c.tokens.end());
    const size_t stride = algo::packed_choices_bytes(most, c.shape.top_k);
    std::vector<std::byte> packed(stride * n() + 1);
    for (uint32_t r = 0; r < n(); ++r) algo::pack_choices(plain.own[r], packed.data() + r * stride);
    const auto canonical = algo::CanonicalOrder(c.tree, placement).position;
    auto unpacked =
        algo::unpack_choices({packed.data(), stride, c.tokens, c.shape.top_k, residents}, placement, canonical);
    EXPECT_TRUE(unpacked.ok()) << unpacked.status().message();
    choices = std::move(*unpacked);
    for (uint32_t r = 0; r < n(); ++r) {
      rank_paths.push_back(std::make_unique<algo::RankPaths>(paths, c.tree, placement, r));
      rows.push_back(algo::ResidualRows::make(choices, placement, r, residents, plain.tables[r]));
    }
    more_shape = c.shape;
    if (residents == Residents::kOfAll) ++more_shape.top_k;
    slot = std::max<uint64_t>(slot_rows, paths.algorithm().dedup() ? 1 : paths.max_origins() * more_shape.top_k);
    shape = algo::moe_plan_shape(paths, c.shape.expert_major, slot);
  }
  uint32_t n() const { return plain_.n(); }

  // Draws homes at random, with as many samples on each rank as before.
  std::vector<int32_t> draw_homes(Random& random) const {
    std::vector<int32_t> homes;
    for (uint32_t i = 0; i < samples.n(); ++i) homes.push_back(static_cast<int32_t>(samples.home(i)));
    for (size_t i = homes.size(); i > 1; --i) std::swap(homes[i - 1], homes[random() % i]);
    return homes;
  }

  void place(const std::vector<int32_t>& new_homes) {
    homes = std::make_unique<algo::Homes>(samples, new_homes, n());
    const algo::Cut cut = algo::find_cut(paths, placement, choices, *homes, slot);
    ASSERT_GT(cut.n_chunks, 0u);
    tables = std::vector<algo::RoutingTables>(n());
    uint32_t least = 1;
    uint64_t largest = 0;
    for (uint32_t r = 0; r < n(); ++r) {
      const algo::HomeRecords records(*rank_paths[r], paths, choices, *homes, rows[r]);
      const Status status = records.fill(tables[r], more_shape, plain_.test_case.weighted, plain_.tables[r]);
      ASSERT_TRUE(status.ok()) << status.message();
      uint64_t needed = 0;
      const uint32_t mine = tables[r].min_chunks(slot, &needed);
      ASSERT_GT(mine, 0u);
      least = std::max(least, mine);
      largest = std::max(largest, tables[r].largest_edge_rows());
      tables[r].build(cut.n_chunks);
    }
    // The result that one rank computes for all is what the ranks would have agreed on.
    EXPECT_EQ(cut.n_chunks, least);
    EXPECT_EQ(cut.largest_edge_rows, largest);
  }

  // Builds the tables of unchanged homes, from the records of the plain routing.
  void stay() {
    std::vector<algo::RecordWriter> writers(n());
    for (uint32_t o = 0; o < n(); ++o) {
      const algo::Paths plain(paths.algorithm(), plain_.test_case.tree, plain_.placement);
      writers[o].write(algo::Ways(plain, plain_.placement, o), plain_.placement, plain_.own[o]);
    }
    const uint32_t n_chunks = tables[0].n_chunks();
    for (uint32_t r = 0; r < n(); ++r) {
      std::vector<algo::RecordView> views(n());
      for (uint32_t o = 0; o < n(); ++o) {
        size_t at = 0;
        for (uint32_t to = 0; to < r; ++to) at += writers[o].bytes()[to] / sizeof(uint32_t);
        views[o] = o == r ? algo::view_of(plain_.own[o])
                          : algo::read_records(writers[o].words().data() + at, writers[o].bytes()[r],
                                               plain_.test_case.weighted)
                                .value();
      }
      rows[r] = algo::ResidualRows::at_home(plain_.tables[r], plain_.test_case.tokens[r]);
      const algo::HomeRecords records(*rank_paths[r], views, plain_.test_case.tokens, plain_.tables[r], rows[r]);
      const Status status = records.fill(tables[r], more_shape, plain_.test_case.weighted, plain_.tables[r]);
      ASSERT_TRUE(status.ok()) << status.message();
      tables[r].build(n_chunks);
    }
  }

  plan::Plan plan(moecclOp_t op) const {
    plan::Plan p = algo::build_moe_plan(op, paths, plain_.test_case.tree, placement, shape);
    p.chunking = {slot, tables[0].n_chunks()};
    return p;
  }
  std::vector<plan::Binding> bindings(moecclOp_t op, bool weighted) const {
    std::vector<plan::Binding> all;
    for (uint32_t r = 0; r < n(); ++r) {
      plan::Binding b = algo::moe_binding(plain_.test_case.shape, tables[r].n_chunks(), slot);
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
  // Returns the rank and index of a token, given by its number.
  std::pair<uint32_t, uint64_t> now(uint64_t token) const {
    const auto at =
        static_cast<uint64_t>(std::find(homes->token.begin(), homes->token.end(), token) - homes->token.begin());
    uint32_t r = 0;
    while (homes->first[r + 1] <= at) ++r;
    return {r, at - homes->first[r]};
  }
  // The terms of combine by definition, from the plain routing's description of its rows.
  struct Term {
    uint32_t rank, row;
    uint64_t token;
    float weight;
  };
  std::vector<Term> terms(bool weighted) const {
    std::vector<Term> all;
    for (uint32_t r = 0; r < n(); ++r) {
      const algo::RoutingTables& t = plain_.tables[r];
      for (uint32_t i = 0; i < t.n_rows(); ++i) {
        if (t.row_source[i] < 0) continue;
        all.push_back(
            {r, i, choices.first_token[static_cast<size_t>(t.row_source[i])] + static_cast<uint64_t>(t.row_token[i]),
             weighted ? t.choice_weight[i] : 1.0f});
      }
      for (const auto& m : rows[r].of_tokens) all.push_back({r, m.to, choices.first_token[r] + m.from, 1.0f});
      for (const auto& m : rows[r].of_rows) {
        if (m.from == m.to) continue;  // Rows: added to the expert's row itself
        all.push_back({r, m.to,
                       choices.first_token[static_cast<size_t>(t.row_source[m.from])] +
                           static_cast<uint64_t>(t.row_token[m.from]),
                       1.0f});
      }
    }
    return all;
  }

 private:
  MoeCluster& plain_;
  Residents residents_;

 public:
  algo::Placement placement;
  algo::Paths paths;
  algo::MoePlanShape shape;
  algo::Samples samples;
  algo::AllChoices choices;
  std::vector<std::unique_ptr<algo::RankPaths>> rank_paths;
  std::vector<algo::ResidualRows> rows;
  std::unique_ptr<algo::Homes> homes;
  std::vector<algo::RoutingTables> tables;
  uint64_t slot = 1;
  algo::MoeShape more_shape;  // with the additional row of a residual
};

MoeCase sample_case(const plan::LevelTree& tree, Random& random) {
  MoeCase c = test::random_case(tree, random);
  c.none = random() % 2 == 0 ? 0.1 : 0.5;  // with few choices, some tokens have no expert
  for (uint64_t& t : c.tokens) t = t / 4 / kSample * kSample;
  return c;
}

void prove(const MoeCluster& plain, const Replaced& replaced, bool weighted) {
  plan::RowExpectation combine, back;
  for (uint32_t r = 0; r < replaced.n(); ++r) {
    combine.input_rows.push_back(replaced.rows[r].n_rows);
    combine.output.emplace_back(plain.test_case.tokens[r]);
    back.input_rows.push_back(plain.test_case.tokens[r]);
    back.output.emplace_back(replaced.rows[r].n_rows);
  }
  for (const Replaced::Term& t : replaced.terms(weighted)) {
    const auto [rank, index] = replaced.now(t.token);
    combine.output[rank][index].terms.push_back({t.rank, t.row, t.weight});
    back.output[t.rank][t.row].terms.push_back({rank, static_cast<uint32_t>(index), t.weight});
  }
  const auto check = [&](moecclOp_t op, const plan::RowExpectation& expected) {
    const plan::Plan plan = replaced.plan(op);
    const std::vector<plan::Binding> bindings = replaced.bindings(op, weighted);
    const bool wasteful =
        op == moecclOpDispatch && !replaced.paths.algorithm().dedup() && !plain.test_case.shape.expert_major;
    const Status status = plan::check({plan, bindings, &expected, nullptr, wasteful});
    EXPECT_TRUE(status.ok()) << (op == moecclOpDispatch ? "backward: " : "combine: ") << status.message();
  };
  check(moecclOpCombine, combine);
  check(moecclOpDispatch, back);
}

// Proves every algorithm with and without residual, for random homes.
void prove_all(const MoeCase& c, Random& random) {
  MoeCluster plain(c, random());
  for (const MoeAlgorithm& a : algo::moe_candidates(c.tree)) {
    plain.route(a, 0);
    for (const Residents residents : {Residents::kNone, Residents::kOfLone, Residents::kOfAll}) {
      SCOPED_TRACE(format("{} ranks {} levels {} residents {}", c.tree.n_ranks, c.tree.depth(), a.name(),
                          static_cast<int>(residents)));
      Replaced replaced(plain, a, residents, 1 + random() % 8);
      replaced.place(replaced.draw_homes(random));
      if (::testing::Test::HasFatalFailure()) return;
      prove(plain, replaced, c.weighted && c.shape.expert_major);
    }
  }
}

TEST(ReplaceTest, ProvedForRandomHomesOnEveryTree) {
  Random random(41);
  for (const test::NamedTree& t : test::moe_trees()) {
    SCOPED_TRACE(t.name);
    for (int round = 0; round < 2; ++round) prove_all(sample_case(t.tree, random), random);
    if (HasFailure()) return;
  }
}

TEST(ReplaceTest, ProvedForEveryCountOfRanksAndForNoTokens) {
  Random random(42);
  for (uint32_t n = 1; n <= 16; ++n) {
    const plan::LevelTree tree = test::tree_of({{"node", {}, {(n + 1) / 2, n / 2 + 1}}});
    MoeCase c = sample_case(tree, random);
    prove_all(c, random);
    c.tokens.assign(tree.n_ranks, 0);
    prove_all(c, random);
    if (HasFailure()) return;
  }
}

// ---- Values ----

Rows run(const MoeCluster& plain, const Replaced& replaced, moecclOp_t op, bool weighted, const Rows& in,
         uint32_t seed) {
  Rows out;
  std::vector<test::RankBuffers> buffers;
  for (uint32_t r = 0; r < replaced.n(); ++r)
    out.emplace_back((op == moecclOpDispatch ? replaced.rows[r].n_rows : plain.test_case.tokens[r]) * kWidth, -777.0f);
  for (uint32_t r = 0; r < replaced.n(); ++r)
    buffers.push_back({reinterpret_cast<const std::byte*>(in[r].data()), reinterpret_cast<std::byte*>(out[r].data())});
  const plan::Plan plan = replaced.plan(op);
  const std::vector<plan::Binding> bindings = replaced.bindings(op, weighted);
  test::Interpreter interpreter(plan.programs, bindings, buffers, moecclFloat32, plain.test_case.shape.grouped);
  EXPECT_TRUE(interpreter.run(seed));
  return out;
}

Rows random_input(const Replaced& replaced, Random& random) {
  Rows in;
  for (uint32_t r = 0; r < replaced.n(); ++r) {
    in.emplace_back(replaced.rows[r].n_rows * kWidth);
    for (float& v : in.back()) v = static_cast<float>(random.unit() - 0.5);
  }
  return in;
}

// The loss curve of a model must not depend on where samples are computed.
TEST(ReplaceTest, DeterministicSumsHaveTheSameBitsAtEveryHome) {
  Random random(43);
  for (const test::NamedTree& t : test::moe_trees()) {
    MoeCase c = sample_case(t.tree, random);
    c.shape.grouped = true;
    c.shape.expert_major = true;
    c.weighted = true;
    c.n_experts = 3 * t.tree.n_ranks;
    c.owner.clear();
    c.shape.top_k = std::min(c.n_experts, 5u);
    MoeCluster plain(c, random());
    for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
      SCOPED_TRACE(format("{} {}", t.name, a.name()));
      plain.route(a, 0);
      Replaced replaced(plain, a, Residents::kOfLone, 4);
      const Rows in = random_input(replaced, random);
      std::vector<std::vector<float>> first;  // by token
      for (int round = 0; round < 3; ++round) {
        std::vector<int32_t> homes;
        for (uint32_t i = 0; i < replaced.samples.n(); ++i)
          homes.push_back(static_cast<int32_t>(replaced.samples.home(i)));
        replaced.place(round == 0 ? homes : replaced.draw_homes(random));
        if (HasFatalFailure()) return;
        const Rows out = run(plain, replaced, moecclOpCombine, true, in, random());
        std::vector<std::vector<float>> by_token;
        for (uint64_t token = 0; token < replaced.choices.n_tokens(); ++token) {
          const auto [rank, index] = replaced.now(token);
          const float* at = out[rank].data() + index * kWidth;
          by_token.emplace_back(at, at + kWidth);
        }
        if (round == 0)
          first = by_token;
        else
          ASSERT_EQ(first, by_token);
      }
    }
  }
}

// ---- Bytes ----

// Counts the rows that combine's lists send between groups of the outermost level.
uint64_t counted(const Replaced& replaced, const std::vector<uint32_t>& node) {
  uint64_t rows = 0;
  for (uint32_t r = 0; r < replaced.n(); ++r)
    for (uint32_t i = 0; i < replaced.rank_paths[r]->edges.in.size(); ++i)
      if (node[replaced.rank_paths[r]->edges.in[i].peer] != node[r]) rows += replaced.tables[r].rows_returned(i);
  return rows;
}

// Counts the same by definition: the rows that must cross for each token, looked up one by one.
uint64_t by_definition(const MoeCluster& plain, const Replaced& replaced, const std::vector<uint32_t>& node) {
  const MoeAlgorithm a = replaced.paths.algorithm();
  uint64_t rows = 0;
  for (uint64_t token = 0; token < replaced.choices.n_tokens(); ++token) {
    const uint32_t home = replaced.now(token).first;
    std::vector<uint64_t> units;
    for (const uint16_t e : replaced.choices.of(token)) {
      const uint32_t owner = replaced.placement.owner[e];
      if (node[owner] == node[home]) continue;
      const bool by_choice = !a.dedup() && plain.test_case.shape.expert_major;
      units.push_back(by_choice ? e : a.dedup() && a.dims > 1 ? node[owner] : owner);
    }
    std::sort(units.begin(), units.end());
    rows += static_cast<uint64_t>(std::unique(units.begin(), units.end()) - units.begin());
  }
  return rows;
}

TEST(ReplaceTest, RowsBetweenNodesAreWhatTheSolverPredicts) {
  Random random(44);
  uint64_t saved = 0;
  for (const test::NamedTree& t : test::moe_trees()) {
    const plan::Level& level = t.tree.levels[0];
    for (int round = 0; round < 3; ++round) {
      const MoeCase c = sample_case(t.tree, random);
      MoeCluster plain(c, random());
      for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
        plain.route(a, 0);
        Replaced replaced(plain, a, static_cast<Residents>(round), 16);
        SCOPED_TRACE(format("{} {} round {}", t.name, a.name(), round));
        const std::vector<int32_t> node(level.group_of_rank.begin(), level.group_of_rank.end());
        const algo::SampleCounts counts = algo::count_samples(
            {a, c.shape.expert_major, &replaced.placement, node, level.n_groups}, replaced.choices, replaced.samples);
        std::vector<int32_t> current, placed(replaced.samples.n());
        for (uint32_t i = 0; i < replaced.samples.n(); ++i)
          current.push_back(static_cast<int32_t>(replaced.samples.home(i)));
        moecclSampleProblem_t p = MOECCL_SAMPLE_PROBLEM_INIT;
        p.n_samples = static_cast<int32_t>(replaced.samples.n());
        p.n_experts = counts.n_columns;
        p.n_devices = static_cast<int32_t>(t.tree.n_ranks);
        p.n_nodes = static_cast<int32_t>(level.n_groups);
        p.num_gather = counts.num.data();
        p.expert_device = counts.device.data();
        p.device_node = node.data();
        p.current = current.data();
        p.min_gain = -1;
        if (replaced.samples.n() == 0) continue;
        const moecclSampleProblem_t problem = solve::checked(p).value();
        moecclSampleAnswer_t answer{};
        auto made = solve::Workspace::make(nullptr, 0, solve::sample_bytes(problem), "");
        solve::Arena arena = made->arena();
        solve::solve_samples(problem, placed.data(), &answer, arena);
        replaced.place(placed);
        if (HasFatalFailure()) return;
        EXPECT_EQ(static_cast<uint64_t>(answer.inter_after), counted(replaced, level.group_of_rank));
        EXPECT_EQ(static_cast<uint64_t>(answer.inter_after), by_definition(plain, replaced, level.group_of_rank));
        EXPECT_LE(answer.inter_after, answer.inter_before);
        saved += static_cast<uint64_t>(answer.inter_before - answer.inter_after);
      }
    }
  }
  EXPECT_GT(saved, 100u);
}

// Where every token stays, the routing's own records give the same lists as all ranks' choices.
TEST(ReplaceTest, StayingNeedsNoChoicesOfOthers) {
  Random random(45);
  for (const test::NamedTree& t : test::moe_trees()) {
    const MoeCase c = sample_case(t.tree, random);
    MoeCluster plain(c, random());
    for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
      SCOPED_TRACE(format("{} {}", t.name, a.name()));
      plain.route(a, 0);
      Replaced replaced(plain, a, Residents::kOfAll, 64);
      std::vector<int32_t> homes;
      for (uint32_t i = 0; i < replaced.samples.n(); ++i)
        homes.push_back(static_cast<int32_t>(replaced.samples.home(i)));
      replaced.place(homes);
      if (HasFatalFailure()) return;
      replaced.stay();
      if (HasFatalFailure()) return;
      prove(plain, replaced, c.weighted && c.shape.expert_major);
    }
  }
}

// NetMoE Eq. 5: both terms count the rows that the plan sends. A next layer with the same routing needs as many rows.
TEST(ReplaceTest, TheNextLayersRowsAreCountedAsThisOnes) {
  Random random(46);
  uint64_t shared = 0;
  for (const test::NamedTree& t : test::moe_trees()) {
    const plan::Level& level = t.tree.levels[0];
    const std::vector<int32_t> node(level.group_of_rank.begin(), level.group_of_rank.end());
    const MoeCase c = sample_case(t.tree, random);
    MoeCluster plain(c, random());
    for (const MoeAlgorithm& a : algo::moe_candidates(t.tree)) {
      SCOPED_TRACE(format("{} {}", t.name, a.name()));
      plain.route(a, 0);
      const Replaced replaced(plain, a, Residents::kNone, 16);
      const algo::CountRequest request{a, c.shape.expert_major, &replaced.placement, node, level.n_groups};
      const algo::SampleCounts counts = algo::count_samples(request, replaced.choices, replaced.samples);
      const algo::CanonicalOrder order(c.tree, replaced.placement);
      const uint32_t n_experts = replaced.placement.n_experts();
      for (uint32_t r = 0; r < t.tree.n_ranks; ++r) {
        const algo::OwnChoices& own = plain.own[r];
        const size_t n_samples = own.n_tokens / kSample;
        std::vector<int32_t> next(n_samples * n_experts + 1), topk(own.n_tokens * c.shape.top_k + 1, -1);
        for (uint64_t token = 0, choice = 0; token < own.n_tokens; ++token)
          for (uint32_t k = 0; k < own.n_experts[token]; ++k, ++choice) {
            ++next[token / kSample * n_experts + own.expert[choice]];
            topk[token * c.shape.top_k + k] = own.expert[choice];
          }
        const auto first = counts.num.begin() + static_cast<ptrdiff_t>(replaced.samples.first[r]) * counts.n_columns;
        const std::vector<int32_t> gather(first, first + static_cast<ptrdiff_t>(n_samples) * counts.n_columns);
        EXPECT_EQ(algo::next_of_counts(request, own, n_experts, next, kSample), gather) << "rank " << r;
        const auto exact =
            algo::next_of_choices(request, order, {topk.data(), nullptr, own.n_tokens}, c.shape.top_k, kSample);
        ASSERT_TRUE(exact.ok()) << exact.status().message();
        EXPECT_EQ(*exact, gather) << "rank " << r;
        shared += own.expert.size() - static_cast<uint64_t>(std::accumulate(gather.begin(), gather.end(), 0));
      }
    }
  }
  EXPECT_GT(shared, 100u) << "no choices shared a row";
}

TEST(ReplaceTest, ChoicesFromPeersAreNotTrusted) {
  const algo::Placement placement = algo::Placement::make(4, 2, nullptr).value();
  const std::vector<uint32_t> canonical{0, 1, 2, 3};
  const std::vector<uint64_t> tokens{1, 1};
  const auto unpack = [&](uint8_t count, uint16_t first, uint16_t second) {
    std::vector<std::byte> packed(2 * algo::packed_choices_bytes(1, 2));
    packed[0] = std::byte{count};
    std::memcpy(packed.data() + 2, &first, 2);
    std::memcpy(packed.data() + 4, &second, 2);
    return algo::unpack_choices({packed.data(), packed.size() / 2, tokens, 2, algo::Residents::kNone}, placement,
                                canonical)
        .ok();
  };
  EXPECT_TRUE(unpack(2, 0, 3));
  EXPECT_FALSE(unpack(3, 0, 3));
  EXPECT_FALSE(unpack(2, 3, 0));
  EXPECT_FALSE(unpack(2, 1, 1));
  EXPECT_FALSE(unpack(1, 4, 0));
}

TEST(ReplaceTest, SamplesAreWhole) {
  const std::vector<uint64_t> whole{4, 0, 8}, torn{4, 3};
  EXPECT_EQ(algo::Samples::make(4, whole).value().home(1), 2u);
  const auto bad = algo::Samples::make(4, torn);
  ASSERT_FALSE(bad.ok());
  EXPECT_NE(bad.status().message().find("rank 1 has 3 tokens"), std::string::npos);
}

}  // namespace
}  // namespace moeccl
