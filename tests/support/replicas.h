// SPDX-License-Identifier: Apache-2.0
// Random placements of replicated experts for tests.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "src/algo/replica_placement.h"
#include "src/plan/levels.h"

namespace moeccl::test {

// Slots of all ranks at random; with `complete` every expert has one where slots suffice.
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

}  // namespace moeccl::test
