// SPDX-License-Identifier: Apache-2.0
// Random placements of replicated experts for tests, and all ranks' programs of a plan that moves rows.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "src/algo/experts/expert_rows.h"
#include "src/algo/replica_placement.h"
#include "src/base/format.h"
#include "src/plan/checker.h"
#include "src/plan/discipline.h"
#include "src/plan/levels.h"

namespace moeccl::test {

// Draws slots for all ranks. With `complete`, every expert has a slot if there are enough slots.
inline algo::ReplicaPlacement random_placement(std::mt19937& random, uint32_t n_ranks, uint32_t n_experts,
                                               uint32_t most_slots, bool complete) {
  std::vector<uint32_t> slots(n_ranks);
  uint32_t total = 0;
  for (uint32_t& s : slots) total += s = static_cast<uint32_t>(random() % (most_slots + 1));
  if (complete)
    for (; total < n_experts; ++total) ++slots[random() % n_ranks];
  std::vector<int32_t> expert(total);
  for (uint32_t i = 0; i < total; ++i)
    expert[i] = complete && i < n_experts ? static_cast<int32_t>(i)
                                          : static_cast<int32_t>(random() % (n_experts + 1)) - (complete ? 0 : 1);
  if (complete)
    for (int32_t& e : expert) e = e == static_cast<int32_t>(n_experts) ? -1 : e;
  std::shuffle(expert.begin(), expert.end(), random);
  auto made = algo::ReplicaPlacement::make(n_experts, slots, expert);
  EXPECT_TRUE(made.ok()) << made.status().message();
  return std::move(*made);
}

inline std::vector<plan::LevelTree> replica_trees() {
  std::vector<plan::LevelTree> trees;
  for (const uint32_t n : {1u, 2u, 3u, 5u, 8u, 16u}) trees.push_back(plan::LevelTree::flat(n));
  for (const std::vector<uint32_t>& nodes :
       {std::vector<uint32_t>{2, 2}, {4, 4}, {7, 8}, {1, 4, 3}, {1, 1, 2}, {4, 4, 4, 4}})
    trees.push_back(*plan::LevelTree::from_sizes({{"node", {}, nodes}}));
  plan::LevelTree dealt = plan::LevelTree::flat(7);
  dealt.levels.insert(dealt.levels.begin(), {"node", {}, {0, 1, 2, 0, 1, 2, 0}, 3});
  trees.push_back(dealt);
  return trees;
}

// Returns whether a plan of the tree can go through its nodes.
inline bool has_nodes(const plan::LevelTree& tree) {
  return tree.depth() > 1 && tree.levels[0].n_groups > 1 && tree.levels[0].n_groups < tree.n_ranks;
}

// Two slots per rank, whose experts ascend with the ranks.
inline algo::ReplicaPlacement spread_placement(uint32_t n_ranks, uint32_t n_experts) {
  std::vector<int32_t> expert(2 * n_ranks);
  for (uint32_t s = 0; s < expert.size(); ++s)
    expert[s] = static_cast<int32_t>(uint64_t{s} * n_experts / expert.size());
  return *algo::ReplicaPlacement::make(n_experts, std::vector<uint32_t>(n_ranks, 2), expert);
}

// Bytes between an expert's hosts and the ranks of other nodes that have shards of it: counted once for each node that
// holds the expert, and once for each rank that does.
struct NodeBytes {
  uint64_t once = 0, each = 0;
};
inline NodeBytes node_bytes(const algo::ReplicaPlacement& placement, const plan::LevelTree& tree, uint64_t expert_bytes,
                            uint64_t element_bytes) {
  const std::vector<uint32_t>& node = tree.levels[0].group_of_rank;
  const uint64_t count = expert_bytes / element_bytes;
  NodeBytes bytes;
  for (uint32_t e = 0; e < placement.n_experts; ++e) {
    std::vector<bool> seen(tree.levels[0].n_groups);
    for (const algo::ExpertHost& host : placement.hosts[e]) {
      uint64_t outside = count;
      for (uint32_t r = 0; r < tree.n_ranks; ++r)
        if (node[r] == node[host.rank]) outside -= algo::shard_of(count, tree.n_ranks, r).length;
      bytes.each += outside * element_bytes;
      if (!seen[node[host.rank]]) bytes.once += outside * element_bytes;
      seen[node[host.rank]] = true;
    }
  }
  return bytes;
}

// All ranks' programs and the tables that they read.
struct BuiltRows : algo::WholeRows {
  template <class Rows>
  explicit BuiltRows(const Rows& rows) : algo::WholeRows(algo::whole_rows(rows)) {}
  Status check(const plan::RowExpectation& expected) const { return plan::check({plan, bindings, &expected}); }
};

// Calls visit(plan, "rank R: " and the step's name) with each plan that lacks one step.
template <class Visit>
void without_each_step(const plan::Plan& plan, Visit&& visit) {
  for (size_t r = 0; r < plan.programs.size(); ++r)
    for (size_t l = 0; l < plan.programs[r].lanes.size(); ++l)
      for (size_t s = 0; s < plan.programs[r].lanes[l].steps.size(); ++s) {
        plan::Plan changed = plan;
        std::vector<plan::Step>& steps = changed.programs[r].lanes[l].steps;
        steps.erase(steps.begin() + static_cast<std::ptrdiff_t>(s));
        changed.programs[r].finalize();
        visit(changed, format("rank {}: {}", r,
                              plan::step_name(plan.programs[r], static_cast<uint32_t>(l), static_cast<uint32_t>(s))));
      }
}

// Returns how many single steps can be left out unnoticed by the checker. `what` names the last one.
inline int unnoticed_losses(const BuiltRows& built, const plan::RowExpectation& expected, std::string* what) {
  int unnoticed = 0;
  without_each_step(built.plan, [&](const plan::Plan& changed, const std::string& step) {
    if (!plan::check({changed, built.bindings, &expected}).ok()) return;
    ++unnoticed;
    *what = step;
  });
  return unnoticed;
}

}  // namespace moeccl::test
