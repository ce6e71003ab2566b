// Algorithm 1 of HierMoE: which algorithm carries a routing at the least cost.
#pragma once

#include <span>
#include <vector>

#include "src/algo/routing.h"

namespace moeccl::algo {

// One candidate's rows of all ranks, from every rank's LevelCounts.
struct LevelLoad {
  uint64_t rows = 0;   // across this level, of all ranks
  double busiest = 0;  // rows that leave or enter the busiest group
};
// counts[rank * n_levels + level].
std::vector<LevelLoad> level_loads(const plan::LevelTree& tree, std::span<const LevelCount> counts);

struct MoePrice {
  MoeAlgorithm algorithm;
  std::vector<LevelLoad> levels;
  std::vector<double> level_us;  // links
  double copy_us = 0, sum_us = 0;
  double dispatch_us() const;
  double combine_us() const;
};
// Eq. 1-5 with uplinks: latency and the busiest group's bytes at each level's bandwidth. Where all ranks share one
// memory, as on this host, a row also costs a copy by its sender however near its receiver is, which is what duplicates
// waste there.
MoePrice price(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, std::vector<LevelLoad> loads,
               uint64_t row_bytes);
// Whether the tree says anything about its links.
bool links_known(const plan::LevelTree& tree);
// Eq. 6 for dispatch and combine together: the cheapest; the first of equal ones.
size_t cheapest(std::span<const MoePrice> prices);

}  // namespace moeccl::algo
