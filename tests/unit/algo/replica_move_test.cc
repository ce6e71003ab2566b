// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_move.h"

#include "src/plan/checker.h"
#include "tests/support/replicas.h"

namespace moeccl {
namespace {

using algo::ReplicaMove;
using algo::ReplicaPlacement;
using test::random_placement;

plan::RowExpectation expectation(const ReplicaMove& move, const ReplicaPlacement& p, moecclOp_t op, uint64_t count) {
  plan::RowExpectation expected;
  const uint64_t shard = algo::shard_elements(count, p.n_ranks);
  for (uint32_t r = 0; r < p.n_ranks; ++r) {
    expected.input_rows.push_back(move.input_elements(r));
    std::vector<plan::ExpectedRow>& rows = expected.output.emplace_back(move.output_elements(r));
    for (plan::ExpectedRow& row : rows) row.any = true;
    if (op == moecclOpCollectGradients) {
      for (uint32_t e = 0; e < p.n_experts; ++e) {
        const uint32_t source = algo::gradient_source(p, e, r);
        const uint64_t first = p.host(e, source)->slots[0] * count;
        for (uint64_t i = r * shard; i < std::min(count, (r + 1) * shard); ++i)
          rows[e * shard + i - r * shard] = {{{source, static_cast<uint32_t>(first + i), 1}}, false};
      }
    } else {
      for (uint32_t s = 0; s < p.n_slots(r); ++s) {
        const int32_t e = p.slot_expert[p.first_slot[r] + s];
        for (uint64_t i = 0; e >= 0 && i < count; ++i)
          rows[s * count + i] = {{{static_cast<uint32_t>(i / shard),
                                   static_cast<uint32_t>(static_cast<uint64_t>(e) * shard + i % shard), 1}},
                                 false};
      }
    }
  }
  return expected;
}

TEST(ReplicaMove, IsProvedForRandomPlacements) {
  std::mt19937 random(9);
  for (const uint32_t n : {1u, 2u, 3u, 5u, 7u, 16u}) {
    for (int i = 0; i < 12; ++i) {
      const uint32_t n_experts = 1 + static_cast<uint32_t>(random() % 12);
      const ReplicaPlacement placement = random_placement(random, n, n_experts, 4, true);
      for (const moecclOp_t op : {moecclOpCollectGradients, moecclOpPlaceWeights}) {
        const uint64_t count = random() % 60;
        // Slots of one to three elements, so that pieces are cut anywhere.
        const ReplicaMove::Settings settings{op, count, 64, {}, 64u * 2 * n * (1 + random() % 3)};
        auto made = ReplicaMove::make(placement, settings);
        ASSERT_TRUE(made.ok()) << made.status().message();
        plan::Plan plan;
        plan.shape = made->shape();
        plan.chunking = made->chunking();
        std::vector<ReplicaMove::Bound> bound;
        std::vector<plan::Binding> bindings;
        for (uint32_t r = 0; r < n; ++r) {
          bound.push_back(made->build(r));
          plan.programs.push_back(bound.back().program);
          bindings.push_back(bound.back().binding);
        }
        const plan::RowExpectation expected = expectation(*made, placement, op, count);
        const Status status = plan::check({plan, bindings, &expected});
        ASSERT_TRUE(status.ok()) << status.message() << "; op " << op << " ranks " << n << " count " << count;
      }
    }
  }
}

// Algorithm 2: own replica first, else the replicas in turn, so that no source serves more than its share, rounded up.
TEST(ReplicaMove, GradientSourcesAreBalanced) {
  const std::vector<uint32_t> slots(16, 1);
  std::vector<int32_t> expert(16, -1);
  for (const size_t r : {1u, 5u, 6u}) expert[r] = 0;
  const ReplicaPlacement placement = *ReplicaPlacement::make(1, slots, expert);
  std::vector<uint32_t> served(16, 0);
  for (uint32_t r = 0; r < 16; ++r) ++served[algo::gradient_source(placement, 0, r)];
  EXPECT_EQ(served[1] + served[5] + served[6], 16u);
  for (const size_t r : {1u, 5u, 6u}) {
    EXPECT_GE(served[r], 4u);
    EXPECT_LE(served[r], 7u);
    EXPECT_EQ(algo::gradient_source(placement, 0, static_cast<uint32_t>(r)), r);
  }
}

TEST(ReplicaMove, AnExpertWithoutReplicaHasNoGradient) {
  const std::vector<uint32_t> slots = {1, 1};
  const std::vector<int32_t> expert = {0, 0};
  const ReplicaPlacement placement = *ReplicaPlacement::make(2, slots, expert);
  const auto made = ReplicaMove::make(placement, {moecclOpCollectGradients, 4, 4, {}, 1 << 20});
  ASSERT_FALSE(made.ok());
  EXPECT_NE(made.status().message().find("expert 1"), std::string::npos) << made.status().message();
  EXPECT_TRUE(ReplicaMove::make(placement, {moecclOpPlaceWeights, 4, 4, {}, 1 << 20}).ok());
}

}  // namespace
}  // namespace moeccl
