#include "src/algo/routing_price.h"

#include <algorithm>
#include <numeric>

namespace moeccl::algo {

namespace {

// Bytes per ns of one rank that gathers rows of 14 KiB: measured on the two-core development machine, both cores busy.
// That sums take twice as long is an estimate. Only the ratio to the links matters, and duplicates cost on any machine.
constexpr double kCopyBytesPerNs = 5.9;
constexpr double kSumBytesPerNs = 3.0;

}  // namespace

std::vector<LevelLoad> level_loads(const plan::LevelTree& tree, std::span<const LevelCount> counts) {
  const size_t depth = tree.depth();
  std::vector<LevelLoad> loads(depth);
  for (size_t l = 0; l < depth; ++l) {
    double peak = 0, mean = 0;
    for (size_t i = l; i < counts.size(); i += depth) {
      const LevelCount& c = counts[i];
      loads[l].rows += c.rows;
      if (c.reach == 0) continue;
      peak += static_cast<double>(c.peak);
      mean += static_cast<double>(c.rows) / static_cast<double>(c.reach);
    }
    // max(p) instead of the mean, as Eq. 4 and 5 have it.
    const double imbalance = mean > 0 ? peak / mean : 1.0;
    loads[l].busiest = static_cast<double>(loads[l].rows) / tree.levels[l].n_groups * imbalance;
  }
  return loads;
}

MoePrice price(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, std::vector<LevelLoad> loads,
               uint64_t row_bytes) {
  MoePrice p{algorithm, std::move(loads), {}, 0, 0};
  double rows = 0;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const plan::LinkCost& link = tree.levels[l].link;
    double ns = p.levels[l].rows > 0 ? link.alpha_ns : 0.0;
    if (link.bytes_per_ns > 0) ns += p.levels[l].busiest * static_cast<double>(row_bytes) / link.bytes_per_ns;
    p.level_us.push_back(ns / 1000);
    rows += static_cast<double>(p.levels[l].rows) / tree.n_ranks;
  }
  p.copy_us = rows * static_cast<double>(row_bytes) / kCopyBytesPerNs / 1000;
  p.sum_us = rows * static_cast<double>(row_bytes) / kSumBytesPerNs / 1000;
  return p;
}

double MoePrice::dispatch_us() const { return std::accumulate(level_us.begin(), level_us.end(), copy_us); }
double MoePrice::combine_us() const { return std::accumulate(level_us.begin(), level_us.end(), sum_us); }

bool links_known(const plan::LevelTree& tree) {
  return std::any_of(tree.levels.begin(), tree.levels.end(),
                     [](const plan::Level& l) { return l.link.bytes_per_ns > 0; });
}

size_t cheapest(std::span<const MoePrice> prices) {
  const auto cost = [](const MoePrice& p) { return p.dispatch_us() + p.combine_us(); };
  const auto best = std::min_element(prices.begin(), prices.end(),
                                     [&](const MoePrice& a, const MoePrice& b) { return cost(a) < cost(b); });
  return static_cast<size_t>(best - prices.begin());
}

}  // namespace moeccl::algo
