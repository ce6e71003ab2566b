// SPDX-License-Identifier: Apache-2.0
// Placements of replicated experts for benchmarks.
#ifndef PERF_MOE_PLACEMENTS_H_
#define PERF_MOE_PLACEMENTS_H_

#include <moeccl/experts.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "perf/common/fail.h"

namespace perf {

// Returns which expert each of n_ranks * slots slots holds, with each expert at least once. "random": slots are drawn;
// "contiguous": the same replicas side by side, as Algorithm 1 places them; "spread": on different ranks as far as
// possible.
inline std::vector<int32_t> make_placement(const std::string& kind, int n_ranks, int slots, int n_experts,
                                           uint64_t seed) {
  const int total = n_ranks * slots;
  if (total < n_experts) fail(std::to_string(total) + " slots do not hold " + std::to_string(n_experts) + " experts");
  std::mt19937_64 random(seed);
  std::vector<int32_t> experts;
  for (int s = 0; s < total; s++)
    experts.push_back(s < n_experts ? s : static_cast<int32_t>(random() % static_cast<uint64_t>(n_experts)));
  if (kind == "random") {
    std::shuffle(experts.begin(), experts.end(), random);
    return experts;
  }
  std::sort(experts.begin(), experts.end());
  if (kind == "contiguous") return experts;
  if (kind != "spread") fail("--placement " + kind + ": use random, contiguous or spread");
  // Replica i of the sorted list goes to rank i mod n: at most ceil(r / n) replicas of an expert share a rank.
  std::vector<int32_t> dealt(experts.size());
  for (int s = 0; s < total; s++)
    dealt[static_cast<size_t>(s % n_ranks * slots + s / n_ranks)] = experts[static_cast<size_t>(s)];
  return dealt;
}

// Returns a rank's slots that hold an expert, counted from 0.
inline std::vector<int> slots_of(const std::vector<int32_t>& experts, int slots, int rank, int expert) {
  std::vector<int> held;
  for (int s = 0; s < slots; s++)
    if (experts[static_cast<size_t>(rank * slots + s)] == expert) held.push_back(s);
  return held;
}

}  // namespace perf

#endif  // PERF_MOE_PLACEMENTS_H_
