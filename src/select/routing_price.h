// SPDX-License-Identifier: Apache-2.0
// Chooses the algorithm that carries a routing at the least cost, as HierMoE's Algorithm 1 does, but by the library's
// own price. src/routing/hiermoe_model.h has Eq. 1 to 6, which moecclMoeExplain shows beside it.
#pragma once

#include <span>
#include <vector>

#include "src/plan/profile.h"
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
  struct OneWay {
    double latency_us = 0;  // of the hops that wait for one another and for a core
    double link_us = 0;     // of the bytes, as far as one hop's do not travel together with another's
    double copy_us = 0;     // packing one way, summing the other way
  };
  MoeAlgorithm algorithm;
  std::vector<LevelLoad> levels;  // of dispatch
  std::vector<double> level_us;   // the busiest group's bytes on its uplink at each level, in dispatch
  std::vector<double> hop_rows;   // [hops] rows of the largest transfer between two ranks; an estimate
  uint32_t n_chunks = 1;          // of the busiest pair of ranks; an estimate
  uint32_t most_chunks = 1;       // into how many it is worth cutting, however large the transfers are
  OneWay dispatch, combine;
  double dispatch_us() const { return total_us(dispatch); }
  double combine_us() const { return total_us(combine); }
  double both_us() const { return dispatch_us() + combine_us(); }

 private:
  // Cores pack one chunk while another is under way.
  double total_us(const OneWay& way) const;
};
// Eq. 1-5 of HierMoE, as the plan runs them:
// - Rows that cross several levels in one hop travel at the same time: that hop takes as long as its slowest level, and
//   its latency is the greatest one. `flat` has one hop, hier:d has d.
// - A hop waits for the one before it, chunk by chunk: with C chunks the slowest hop's bytes count in full, and 1/C of
//   the others'; each hop's latency counts once.
// - A slot is filled again once its last chunk was taken and the sender knows that: with more chunks than a peer has
//   slots, every round of slots waits for two latencies, unless the bytes take longer. One lane serves all hops after
//   the first (moe_plan.h), so it waits for each hop's rows before it passes on the next one's. The slowest of all this
//   sets the pace of chunks. C is the power of two with the least total time.
// - Every row that crosses a level is packed by a core of its sender's host, and every row for an expert is unpacked;
//   ranks share the cores if there are more ranks. This is what duplicates waste within one memory.
// - With more ranks than cores, each hop also waits until every rank of a core has had its turn.
// - Combine does the same with the rows that return.
struct MoeRows {
  std::vector<LevelLoad> levels;
  uint64_t row_bytes = 0;
  double delivered = 0;                  // to experts, of a rank on average
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
