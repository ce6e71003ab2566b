// SPDX-License-Identifier: Apache-2.0
// The parts of expert load balance, for one layer: EPLB's placement, a lower bound, the search, and names of GPUs that
// leave experts where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moeccl::solve {

struct BalanceShape {
  size_t experts = 0, slots = 0, groups = 1;
  size_t gpus = 1, pools = 1;  // a pool: GPUs that may hold the same experts, which is a node or all GPUs
  size_t per_gpu() const { return slots / gpus; }
  size_t pool_gpus() const { return gpus / pools; }
  size_t pool_slots() const { return slots / pools; }
};
using Slots = std::vector<int32_t>;  // the expert of each slot
using Loads = std::span<const double>;

// What a placement is judged by. The loads of fullest GPUs below `enough` count as equal.
struct BalanceTerms {
  const int32_t* current = nullptr;  // [slots], -1: none; null: nothing is placed yet
  double move_cost = 0, enough = 0;
};
struct Judged {
  double cost = 0;  // of the fullest GPU and of the moves
  int64_t moved = 0;
  double fullest = 0;
  bool better_than(const Judged& other) const { return cost != other.cost ? cost < other.cost : moved < other.moved; }
};
Judged judge(const BalanceShape& shape, Loads load, const BalanceTerms& terms, const Slots& slots);
double fullest_gpu(const BalanceShape& shape, Loads load, const Slots& slots);

std::vector<double> group_loads(const BalanceShape& shape, Loads load);
// Returns EPLB's split of the groups: those of the first pool, then those of the next.
Slots split_groups(const BalanceShape& shape, Loads load);
// Returns EPLB's placement for a split of the groups.
Slots greedy_placement(const BalanceShape& shape, Loads load, const Slots& groups);
// Returns a load that the fullest GPU has at least, in every placement.
double least_fullest(const BalanceShape& shape, Loads load);

// Returns the best placement that changes of `start` lead to. `work` bounds how many loads of GPUs are computed.
Slots search_placement(const BalanceShape& shape, Loads load, const BalanceTerms& terms, const Slots& start,
                       int64_t work);

// Exchanges GPUs of a pool and slots of a GPU so that the most experts are where `current` has them, and before, if it
// is asked to, pools. That brings the most experts to the right pool, but may leave fewer on the right GPU.
Slots stay_near(const BalanceShape& shape, const Slots& slots, const int32_t* current, bool exchange_pools);

}  // namespace moeccl::solve
