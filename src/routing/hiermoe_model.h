// SPDX-License-Identifier: Apache-2.0
// HierMoE's own performance model in closed form (Eq. 1-6): the cost of a routing under the measured alpha and beta of
// whole AlltoAlls. moe_price.h prices the same traffic step by step instead.
#pragma once

#include <span>
#include <vector>

#include "src/plan/profile.h"
#include "src/routing/moe_traffic.h"

namespace moeccl::algo {

struct HierMoeTime {
  double total_ns = 0;
  std::vector<double> hop_ns;     // [hops]
  std::vector<double> hop_bytes;  // [hops] n of Eq. 2, 4, 5: ranks in the AlltoAll x max(p) x row
};

// Checks that the profile has every AlltoAll that the algorithm needs; the error names the first one that is missing.
Status hiermoe_knows(const MoeAlgorithm& algorithm, const plan::AllToAllCosts& costs);

// Derives the AlltoAlls from the topology's links if there are no measurements: a rank's share of its group's uplink.
plan::AllToAllCosts all_to_all_of_links(const plan::LevelTree& tree);

// Returns the time of one direction (dispatch or combine). Flat and hier:1 are one standard AlltoAll (Eq. 1 and 2),
// without and with deduplication; 2dh and hier:d are Inter-level AlltoAlls and one Intra-level AlltoAll (Eq. 3-5).
// peak_rows[hops]: max(p), the most rows that one rank sends to one other rank in that hop.
HierMoeTime hiermoe_time(const MoeAlgorithm& algorithm, std::span<const double> peak_rows, const plan::LevelTree& tree,
                         const plan::AllToAllCosts& costs, uint64_t row_bytes);
HierMoeTime hiermoe_time(const MoeAlgorithm& algorithm, const Traffic& traffic, const plan::LevelTree& tree,
                         const plan::AllToAllCosts& costs, uint64_t row_bytes);

}  // namespace moeccl::algo
