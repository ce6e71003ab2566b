// SPDX-License-Identifier: Apache-2.0
// HierMoE's own performance model in closed form (Eq. 1-6): what a routing costs under measured alpha and beta of whole
// AlltoAlls. moe_price.h prices the same traffic step by step instead.
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

// Whether the profile knows every AlltoAll that the algorithm needs; the sentence names the first that is missing.
Status hiermoe_knows(const MoeAlgorithm& algorithm, const plan::AllToAllCosts& costs);

// The AlltoAlls as the topology's links have them, where nobody has measured any: a rank's share of its group's uplink.
plan::AllToAllCosts all_to_all_of_links(const plan::LevelTree& tree);

// One direction (dispatch or combine). Flat and hier:1 are one standard AlltoAll (Eq. 1 and 2), without and with
// deduplication; 2dh and hier:d are Inter-level AlltoAlls and one Intra-level AlltoAll (Eq. 3-5).
// peak_rows: [hops] max(p), the most rows of one rank for one other rank in that hop.
HierMoeTime hiermoe_time(const MoeAlgorithm& algorithm, std::span<const double> peak_rows, const plan::LevelTree& tree,
                         const plan::AllToAllCosts& costs, uint64_t row_bytes);
HierMoeTime hiermoe_time(const MoeAlgorithm& algorithm, const Traffic& traffic, const plan::LevelTree& tree,
                         const plan::AllToAllCosts& costs, uint64_t row_bytes);

}  // namespace moeccl::algo
