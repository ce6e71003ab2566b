// SPDX-License-Identifier: Apache-2.0
// Proofs of experts' plans as MOECCL_CHECK_PLANS makes them: right plans are accepted, whatever their size, and wrong
// ones are refused.
#include "src/algo/experts/prove_experts.h"

#include "src/algo/experts/expert_gather.h"
#include "src/algo/experts/expert_return.h"
#include "src/algo/experts/gradient_reduce.h"
#include "src/algo/replica_move.h"
#include "src/algo/replica_reduce.h"
#include "tests/support/replicas.h"

namespace moeccl::algo {
namespace {

constexpr uint64_t kCount = 1 << 20, kStaging = 4 << 20;
constexpr moecclOp_t kRowOps[] = {moecclOpCollectGradients, moecclOpReduceGradients, moecclOpPlaceWeights};

Result<WholeRows> rows_of(moecclOp_t op, const ReplicaPlacement& p, const plan::LevelTree& tree, bool nodes,
                          const RowSize& size) {
  if (op == moecclOpReduceGradients) {
    const auto way = nodes ? GradientReduce::Way::kNodes : GradientReduce::Way::kDirect;
    MOECCL_ASSIGN_OR_RETURN(
        const GradientReduce made,
        GradientReduce::make(p, tree, {size.count, size.element_bytes, true, {}, size.staging_bytes, way}));
    return whole_rows(made);
  }
  const auto way = nodes ? ReplicaMove::Way::kNodes : ReplicaMove::Way::kDirect;
  MOECCL_ASSIGN_OR_RETURN(
      const ReplicaMove made,
      ReplicaMove::make(p, tree, {op, size.count, size.element_bytes, {}, size.staging_bytes, way}));
  return whole_rows(made);
}

TEST(ProveExperts, RightPlansPass) {
  std::mt19937 random(11);
  for (const plan::LevelTree& tree : test::replica_trees()) {
    const ReplicaPlacement p = test::random_placement(random, tree.n_ranks, 6, 4, true);
    for (const ReduceKind kind : {ReduceKind::kDirect, ReduceKind::kFlat, ReduceKind::kNodes}) {
      const plan::Shape shape = replica_shape(p, kCount, 4, {.views = kind == ReduceKind::kDirect}, kStaging);
      const Status status = prove_blocks(ReplicaReduce(p, shape, tree, kind, true).build_all(), expected_sums(p, true));
      EXPECT_TRUE(status.ok()) << reduce_kind_name(kind) << " on " << tree.n_ranks << ": " << status.message();
    }
    for (const moecclOp_t op : kRowOps)
      for (const bool nodes : {false, true}) {
        if (nodes && (op == moecclOpCollectGradients || !test::has_nodes(tree))) continue;
        const Status status =
            prove_rows(p, true, [&](const RowSize& size) { return rows_of(op, p, tree, nodes, size); });
        EXPECT_TRUE(status.ok()) << op << " nodes " << nodes << " on " << tree.n_ranks << ": " << status.message();
      }
    const Placement homes = *Placement::make(7, tree.n_ranks, nullptr);
    const Domains domains = *Domains::make(tree, std::vector<uint32_t>(tree.depth(), 3));
    for (const auto way : {ExpertExchange::Way::kDirect, ExpertExchange::Way::kStaged}) {
      ExpertExchange call{kCount, 4, {.views = true}, 64 << 20};
      call.way = way;
      const ExpertGather gather = *ExpertGather::make(domains, homes, call);
      const ExpertReturn back = *ExpertReturn::make(domains, homes, call);
      const Status there = prove_blocks(gather.build_all(), expected_exchange(gather));
      EXPECT_TRUE(there.ok()) << gather.name() << " on " << tree.n_ranks << ": " << there.message();
      const Status returned = prove_blocks(back.build_all(), expected_exchange(back));
      EXPECT_TRUE(returned.ok()) << back.name() << " on " << tree.n_ranks << ": " << returned.message();
    }
  }
}

TEST(ProveExperts, APlanThatLacksAnyOneStepIsRefused) {
  const plan::LevelTree tree = *plan::LevelTree::from_sizes({{"node", {}, {2, 2}}});
  const std::vector<uint32_t> slots(4, 2);
  const std::vector<int32_t> expert = {0, 0, 1, 0, 0, 1, 1, 1};
  const ReplicaPlacement p = *ReplicaPlacement::make(2, slots, expert);
  const auto refuses = [](const Status& status, const std::string& step) {
    EXPECT_EQ(status.code(), moecclInternalError) << step;
    EXPECT_NE(status.message().find("the plan is wrong, please report it"), std::string::npos) << status.message();
  };
  const plan::Shape shape = replica_shape(p, kCount, 4, {}, kStaging);
  test::without_each_step(ReplicaReduce(p, shape, tree, ReduceKind::kNodes, true).build_all(),
                          [&](const plan::Plan& plan, const std::string& step) {
                            refuses(prove_blocks(plan, expected_sums(p, true)), step);
                          });
  const Placement homes = *Placement::make(4, 4, nullptr);
  const Domains domains = *Domains::make(tree, {2, 2});
  const ExpertReturn back = *ExpertReturn::make(domains, homes, {kCount, 4, {}, kStaging});
  test::without_each_step(back.build_all(), [&](const plan::Plan& plan, const std::string& step) {
    refuses(prove_blocks(plan, expected_exchange(back)), step);
  });
  constexpr uint64_t kElements = 24;
  for (const moecclOp_t op : {moecclOpReduceGradients, moecclOpPlaceWeights}) {
    WholeRows rows = std::move(*rows_of(op, p, tree, true, {kElements, 64, 64 * 2 * 12}));
    ASSERT_GT(rows.plan.chunking.n_chunks, 3u);
    ASSERT_TRUE(prove_rows(rows, p, kElements, true).ok());
    test::without_each_step(plan::Plan(rows.plan), [&](const plan::Plan& plan, const std::string& step) {
      rows.plan = plan;
      refuses(prove_rows(rows, p, kElements, true), step);
    });
  }
}

}  // namespace
}  // namespace moeccl::algo
