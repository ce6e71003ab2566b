// SPDX-License-Identifier: Apache-2.0
// Chooses the algorithm that carries a routing at the least cost, as HierMoE's Algorithm 1 does, but by the library's
// own price. src/routing/hiermoe_model.h has Eq. 1 to 6, which moecclMoeExplain shows beside it.
#pragma once

#include <span>
#include <vector>

#include "src/plan/profile.h"
#include "src/routing/hop_time.h"
#include "src/routing/routing.h"

namespace moeccl::algo {

// One candidate's rows over all ranks, from every rank's LevelCounts.
struct LevelLoad {
  uint64_t rows = 0;   // across this level, over all ranks
  double busiest = 0;  // rows that leave or enter the busiest group
};
// counts[rank * n_levels + level].
std::vector<LevelLoad> level_loads(const plan::LevelTree& tree, std::span<const LevelCount> counts);

struct MoePrice {
  MoeAlgorithm algorithm;
  std::vector<LevelLoad> levels;  // of dispatch
  std::vector<double> level_us;   // the busiest group's bytes on its uplink at each level, in dispatch
  std::vector<double> hop_rows;   // [hops] rows of the largest transfer between two ranks; an estimate
  uint32_t n_chunks = 1;          // of the busiest pair of ranks; an estimate
  uint32_t most_chunks = 1;       // into how many it is worth cutting, however large the transfers are
  WayTime dispatch, combine;
  double begin_us = 0;  // until all ranks of a core have begun and ended an operation; the same for every plan
  double dispatch_us() const { return begin_us + dispatch.total_us; }
  double combine_us() const { return begin_us + combine.total_us; }
  double both_us() const { return dispatch_us() + combine_us(); }
};
// Eq. 1-5 of HierMoE, as the plan runs them (way_time() in hop_time.h has the overlaps):
// - Rows that cross several levels in one hop travel at the same time: that hop takes as long as its slowest level, and
//   its latency is the greatest one. `flat` has one hop, hier:d has d.
// - A row is copied by a core of its sender's host and again by a core of its receiver's, or summed on the way back,
//   where each sum reads all its terms and writes one row. Ranks of a core take turns. This is what duplicates waste
//   within one memory.
// - In the first hop each peer has its own signal, so its rows travel while those for the next peer are packed, and the
//   receiver spreads them while others are under way. Rows that another hop passes on wait for all rows before it, and
//   so does the last sum of combine.
// - With more ranks than cores, each hop also waits until every rank of a core has had its turn, and so do the
//   beginning and the end of the operation.
// - C, the number of chunks, is the power of two with the least total time.
struct MoeRows {
  std::vector<LevelLoad> levels;
  uint64_t row_bytes = 0;
  double delivered = 0;                  // to experts, of a rank on average
  double tokens = 0;                     // of a rank on average
  std::vector<LevelLoad> returned = {};  // by combine; empty: as many as were sent
};
// Links are the profile's if it has measured them, otherwise the tree's.
MoePrice price(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile, MoeRows rows);
// Returns whether the tree has any figures for its links.
bool links_known(const plan::LevelTree& tree);
// Eq. 6 for dispatch and combine together: returns the cheapest, or the first of equal ones.
size_t cheapest(std::span<const MoePrice> prices);

// The result of HierMoE's own model (Eq. 1-6): dispatch and combine of each candidate, and d*. The model takes whole
// AlltoAlls one after another, without the chunks that let hops and copies overlap.
struct HierMoeChoice {
  bool measured = false;        // with the profile's AlltoAlls; otherwise with the topology's links
  std::vector<double> both_us;  // [candidates]; 0: a figure is missing
  size_t best = 0;
};
HierMoeChoice hiermoe_choice(std::span<const MoePrice> prices, const plan::LevelTree& tree,
                             const plan::Profile& profile, uint64_t row_bytes);

}  // namespace moeccl::algo
