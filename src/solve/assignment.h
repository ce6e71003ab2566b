// SPDX-License-Identifier: Apache-2.0
// Balanced assignment as a transportation problem: items have a cost for each bin, and bins take exactly their
// capacity. NetMoE (Eq. 6, 7, 10) copies each bin capacity times and runs Kuhn-Munkres in O(items^3). Here bins stay
// single, and paths are searched in the graph of bins, where the length of u -> v is the least price of moving one
// item.
#pragma once

#include <cstdint>

#include "src/base/status.h"
#include "src/solve/arena.h"

namespace moeccl::solve {

inline constexpr int32_t kMostCost = (1 << 30) - 1;

struct Assignment {
  const int32_t* cost = nullptr;      // [n_items][n_bins], 0 .. kMostCost
  const int32_t* capacity = nullptr;  // [n_bins], sums to n_items
  int32_t n_items = 0;
  int32_t n_bins = 0;
};

// The error names the argument that is wrong.
Status check(const Assignment& problem);
size_t assignment_bytes(int32_t n_items, int32_t n_bins);
// Fills bin[n_items] with an exact solution and returns the sum of costs. The problem must have been checked, and the
// arena must hold assignment_bytes(). The result depends on the arguments alone, so that all ranks get the same.
int64_t assign(const Assignment& problem, int32_t* bin, Arena& arena);

}  // namespace moeccl::solve
