// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_reduce.h"

#include "src/algo/experts/prove_experts.h"
#include "src/plan/checker.h"
#include "src/plan/cost.h"
#include "tests/support/replicas.h"

namespace moeccl {
namespace {

using algo::ReplicaPlacement;
using algo::ReplicaReduce;
using test::random_placement;

constexpr algo::ReduceKind kKinds[] = {algo::ReduceKind::kDirect, algo::ReduceKind::kFlat, algo::ReduceKind::kNodes};

struct Case {
  const ReplicaPlacement& placement;
  const plan::LevelTree& tree;
  uint64_t count = 1, staging = 16 << 20;
  bool staging_views = true;
  algo::ReduceKind kind = algo::ReduceKind::kFlat;
  bool average = false, in_place = false;
};

plan::Shape shape_of(const Case& c) {
  plan::Shape shape = algo::replica_shape(
      c.placement, c.count, 64, {.staging = c.staging_views, .views = c.kind == algo::ReduceKind::kDirect}, c.staging);
  shape.in_place = c.in_place;
  return shape;
}

// Returns staging for chunks of `elements`.
uint64_t tight(const Case& c, uint64_t elements) {
  const plan::Shape shape = shape_of(c);
  const algo::Layout layout = ReplicaReduce(c.placement, shape, c.tree, c.kind, c.average).layout();
  return 64 * elements * std::max(1u, layout.n_slots) * layout.depth;
}

Status prove(const Case& c) {
  const plan::Shape shape = shape_of(c);
  const ReplicaReduce reduce(c.placement, shape, c.tree, c.kind, c.average);
  MOECCL_TRY(reduce.fits());
  const plan::Plan plan = reduce.build_all();
  const std::vector<plan::Binding> bindings = plan::uniform_bindings(plan);
  const plan::BlockExpectation expected = algo::expected_sums(c.placement, c.average);
  plan::CheckInput input{plan, bindings};
  input.blocks = &expected;
  return plan::check(input);
}

TEST(ReplicaReduce, IsProvedForRandomPlacementsOnEveryTree) {
  std::mt19937 random(7);
  for (const plan::LevelTree& tree : test::replica_trees()) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t n_experts = 1 + static_cast<uint32_t>(random() % (2 * tree.n_ranks));
      const ReplicaPlacement placement = random_placement(random, tree.n_ranks, n_experts, 5, i % 2 == 0);
      Case c{placement, tree};
      c.count = random() % 40;
      c.staging_views = i % 4 < 2;
      c.average = random() % 2 == 0;
      c.in_place = random() % 2 == 0;
      for (const algo::ReduceKind kind : kKinds) {
        c.kind = kind;
        c.staging = tight(c, 1 + random() % 20);
        const Status status = prove(c);
        ASSERT_TRUE(status.ok()) << status.message() << "; ranks " << tree.n_ranks << " experts " << n_experts
                                 << " count " << c.count << " views " << c.staging_views << " kind "
                                 << reduce_kind_name(kind) << " in place " << c.in_place << " round " << i;
      }
    }
  }
}

TEST(ReplicaReduce, SixteenExpertsInSixtyFourSlotsOfSixteenRanks) {
  std::mt19937 random(3);
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {}, {4, 4, 4, 4}}});
  const std::vector<uint32_t> slots(16, 4);
  std::vector<int32_t> expert(64);
  for (int round = 0; round < 4; ++round) {
    for (int32_t& e : expert) e = static_cast<int32_t>(random() % 16);
    const ReplicaPlacement placement = *ReplicaPlacement::make(16, slots, expert);
    for (const algo::ReduceKind kind : kKinds)
      for (const bool views : {false, true}) {
        const Status status = prove({placement, tree, 50, 1 << 20, views, kind, true, true});
        ASSERT_TRUE(status.ok()) << status.message();
      }
  }
}

// Several replicas on one rank cost as much as one. Between nodes, "nodes" carries the least that a sum can.
TEST(ReplicaReduce, BytesBetweenNodesAreThoseOfTheFormula) {
  std::mt19937 random(5);
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {}, {4, 4, 4}}});
  const std::vector<uint32_t>& node_of = tree.levels[0].group_of_rank;
  for (int round = 0; round < 10; ++round) {
    const ReplicaPlacement placement = random_placement(random, 12, 8, 6, true);
    uint64_t least = 0;
    for (const std::vector<algo::ExpertHost>& hosts : placement.hosts) {
      std::vector<bool> in_node(3, false);
      for (const algo::ExpertHost& host : hosts) in_node[node_of[host.rank]] = true;
      least += 2 * static_cast<uint64_t>(std::count(in_node.begin(), in_node.end(), true) - 1) * 96 * 64;
    }
    uint64_t crossing[2] = {};
    for (const bool by_nodes : {false, true}) {
      const plan::Shape shape = shape_of({placement, tree, 96});
      const plan::Cost cost =
          plan::price(ReplicaReduce(placement, shape, tree, by_nodes ? kKinds[2] : kKinds[1], false).build_all(), tree,
                      plan::Profile{});
      crossing[by_nodes] = cost.level_bytes[0];
    }
    EXPECT_EQ(crossing[1], least);
    EXPECT_GE(crossing[0], crossing[1]);
  }
}

// Section 4.1: a placement with several replicas on one rank sends no more between nodes than one with the same
// replicas spread over ranks.
TEST(ReplicaReduce, ReplicasSideBySideCostNoMoreThanSpread) {
  std::mt19937 random(13);
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {}, {4, 4, 4, 4}}});
  const std::vector<uint32_t> slots(16, 4);
  for (int round = 0; round < 10; ++round) {
    std::vector<int32_t> sorted;
    for (int32_t s = 0; s < 64; ++s) sorted.push_back(s < 16 ? s : static_cast<int32_t>(random() % 16));
    std::sort(sorted.begin(), sorted.end());
    std::vector<int32_t> spread(64);
    for (size_t s = 0; s < 64; ++s) spread[s % 16 * 4 + s / 16] = sorted[s];
    for (const bool by_nodes : {false, true}) {
      uint64_t bytes[2] = {};
      for (const bool packed : {false, true}) {
        const ReplicaPlacement p = *ReplicaPlacement::make(16, slots, packed ? sorted : spread);
        const plan::Shape shape = shape_of({p, tree, 96});
        bytes[packed] = plan::price(ReplicaReduce(p, shape, tree, by_nodes ? kKinds[2] : kKinds[1], false).build_all(),
                                    tree, plan::Profile{})
                            .level_bytes[0];
      }
      EXPECT_LE(bytes[true], bytes[false]);
    }
  }
}

TEST(ReplicaReduce, HashTellsPlacementsApart) {
  const plan::LevelTree tree = plan::LevelTree::flat(2);
  const std::vector<uint32_t> slots = {1, 1};
  const std::vector<int32_t> same = {0, 0}, other = {0, 1};
  const ReplicaPlacement a = *ReplicaPlacement::make(2, slots, same), b = *ReplicaPlacement::make(2, slots, other);
  const plan::Shape sa = shape_of({a, tree, 8}), sb = shape_of({b, tree, 8});
  EXPECT_NE(ReplicaReduce(a, sa, tree, kKinds[1], false).hash(), ReplicaReduce(b, sb, tree, kKinds[1], false).hash());
  EXPECT_NE(ReplicaReduce(a, sa, tree, kKinds[1], false).hash(), ReplicaReduce(a, sa, tree, kKinds[1], true).hash());
}

// A slot beyond a Ref's 16 bits would be another one.
TEST(ReplicaReduce, MoreSlotsThanHaveANumberDoNotFit) {
  constexpr uint32_t kRanks = 16, kExperts = 4000;
  std::vector<int32_t> slots;
  for (uint32_t r = 0; r < kRanks; ++r)
    for (uint32_t e = 0; e < kExperts; ++e) slots.push_back(static_cast<int32_t>(e));
  const ReplicaPlacement placement =
      ReplicaPlacement::make(kExperts, std::vector<uint32_t>(kRanks, kExperts), slots).value();
  const plan::LevelTree tree = plan::LevelTree::flat(kRanks);
  const Case c{.placement = placement, .tree = tree, .staging = uint64_t{1} << 32, .staging_views = false};
  const plan::Shape shape = shape_of(c);
  const Status fits = ReplicaReduce(placement, shape, tree, algo::ReduceKind::kFlat, false).fits();
  EXPECT_NE(fits.message().find("slots of staging: at most 65536 have a number"), std::string::npos) << fits.message();
}

TEST(ReplicaReduce, AnExpertThatDoesNotExistIsNamed) {
  const std::vector<uint32_t> slots = {2};
  const std::vector<int32_t> expert = {0, 7};
  const auto made = ReplicaPlacement::make(3, slots, expert);
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("slot_expert[1]"), std::string::npos) << made.status().message();
}

// The proof notices any missing signal, wait or step.
TEST(ReplicaReduce, LosesItsProofWithoutAnyOneStep) {
  std::mt19937 random(11);
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {}, {2, 2}}});
  const std::vector<uint32_t> slots(4, 2);
  const std::vector<int32_t> expert = {0, 0, 1, 0, 0, 1, 1, 1};
  const ReplicaPlacement placement = *ReplicaPlacement::make(3, slots, expert);
  for (const auto& [views, kind] : {std::pair{false, kKinds[2]}, {true, kKinds[2]}, {true, kKinds[0]}}) {
    Case c{placement, tree, 24, 16 << 20, views, kind, true, true};
    c.staging = tight(c, 6);
    const plan::Shape shape = shape_of(c);
    const ReplicaReduce reduce(placement, shape, tree, kind, true);
    const plan::Plan whole = reduce.build_all();
    // "direct" has no staging that limits its chunks; its signals enclose all of them.
    if (kind != kKinds[0]) {
      ASSERT_GT(whole.chunking.n_chunks, 3u);
    }
    const plan::BlockExpectation expected = algo::expected_sums(placement, true);
    const std::vector<plan::Binding> bindings = plan::uniform_bindings(whole);
    test::without_each_step(whole, [&](const plan::Plan& broken, const std::string& step) {
      plan::CheckInput input{broken, bindings};
      input.blocks = &expected;
      EXPECT_FALSE(plan::check(input).ok()) << "views " << views << ", without " << step;
    });
  }
}

}  // namespace
}  // namespace moeccl
