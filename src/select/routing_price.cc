// SPDX-License-Identifier: Apache-2.0
#include "src/select/routing_price.h"

#include <algorithm>

#include "src/algo/moe_plan.h"
#include "src/routing/hiermoe_model.h"
#include "src/routing/hop_time.h"

namespace moeccl::algo {

namespace {

struct Host {
  double ranks, cores;  // at most one core a rank
};
Host host_of(const plan::LevelTree& tree, const plan::Profile& profile) {
  const double ranks = std::max(1.0, plan::ranks_per_host(tree, profile));
  return {ranks, std::clamp<double>(profile.cores, 1.0, ranks)};
}

// Returns the time to pack or sum `bytes` on every rank, where the ranks of a host share its cores and its memory. Rows
// of 4 KiB run at the rate of one piece (8 ranks on the two-core development machine, docs/decisions.md).
double packing_us(const plan::LevelTree& tree, const plan::Profile& profile, double bytes) {
  const auto [ranks, cores] = host_of(tree, profile);
  const bool cached = bytes * ranks <= static_cast<double>(profile.cache_bytes) * cores;
  const double rate = cached ? profile.cached_copy_bytes_per_ns * cores
                             : std::min(profile.stream_bytes_per_ns * cores, profile.host_copy_bytes_per_ns);
  return bytes * ranks / rate / 1000;
}

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
    // Uses max(p) instead of the mean, as in Eq. 4 and 5.
    const double imbalance = mean > 0 ? peak / mean : 1.0;
    loads[l].busiest = static_cast<double>(loads[l].rows) / tree.levels[l].n_groups * imbalance;
  }
  return loads;
}

namespace {

// Returns the hop of the algorithm in which rows cross a level.
uint32_t hop_of(const MoeAlgorithm& algorithm, uint32_t level) {
  if (algorithm.kind == PathKind::kHier) return std::min(level, algorithm.dims - 1);
  if (algorithm.kind == PathKind::k2dh) return level == 0 ? 1 : 0;
  return 0;
}

// Returns the rows of the largest transfer between two ranks at a level, from the load of the busiest group: its ranks
// share the load evenly, and each sends to one rank of every other group or, in the last hop, to all of their ranks.
double edge_rows(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const LevelLoad& load, uint32_t level) {
  const plan::Level& l = tree.levels[level];
  const double above = level == 0 ? 1.0 : tree.levels[level - 1].n_groups;
  const double siblings = l.n_groups / above - 1;
  const double ranks = static_cast<double>(tree.n_ranks) / l.n_groups;
  const bool one_each =
      algorithm.kind == PathKind::kHier ? level + 1 < algorithm.dims : algorithm.kind == PathKind::k2dh && level == 0;
  return siblings > 0 ? load.busiest / (ranks * siblings * (one_each ? 1.0 : ranks)) : 0.0;
}

}  // namespace

namespace {

// What one way of the rows takes, without the overlap of chunks.
struct Hops {
  std::vector<double> level_us, us, latency_us;  // level_us by level, the others by hop
  double copy_us = 0;
};
Hops hops_of(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile,
             const MoeRows& rows, std::span<const LevelLoad> loads) {
  Hops hops;
  hops.us.resize(tree.depth() + 1);
  hops.latency_us.resize(tree.depth() + 1);
  const auto row_bytes = static_cast<double>(rows.row_bytes);
  double copied = rows.delivered;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const plan::LinkCost link = plan::link_of(tree, profile, l);
    const uint32_t hop = hop_of(algorithm, l);
    hops.level_us.push_back(link.bytes_per_ns > 0 ? loads[l].busiest * row_bytes / link.bytes_per_ns / 1000 : 0.0);
    hops.us[hop] = std::max(hops.us[hop], hops.level_us.back());
    // Ranks wait for each other's signals even where no rows come with them.
    hops.latency_us[hop] = std::max(hops.latency_us[hop], link.alpha_ns / 1000);
    copied += static_cast<double>(loads[l].rows) / tree.n_ranks;
  }
  const auto [ranks, cores] = host_of(tree, profile);
  const double turns_us = ranks > cores ? ranks / cores * profile.switch_ns / 1000 : 0;
  const uint32_t last =
      tree.depth() == 0 ? 0 : hop_of(algorithm, algorithm.kind == PathKind::k2dh ? 0 : tree.depth() - 1);
  for (uint32_t hop = 0; hop <= last; ++hop) hops.latency_us[hop] += turns_us;
  hops.copy_us = packing_us(tree, profile, copied * row_bytes);
  return hops;
}

MoePrice::OneWay cut(const Hops& hops, uint32_t chunks) {
  const HopTime t = hop_time(hops.us, hops.latency_us, chunks);
  return {t.latency_us, t.link_us, hops.copy_us};
}

}  // namespace

MoePrice price(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile,
               MoeRows given) {
  MoePrice p;
  p.algorithm = algorithm;
  const Hops there = hops_of(algorithm, tree, profile, given, given.levels);
  const Hops back = given.returned.empty() ? there : hops_of(algorithm, tree, profile, given, given.returned);
  double largest_edge = 0;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const double edge = edge_rows(algorithm, tree, given.levels[l], l);
    const uint32_t hop = hop_of(algorithm, l);
    p.hop_rows.resize(std::max<size_t>(p.hop_rows.size(), hop + 1), 0.0);
    p.hop_rows[hop] = std::max(p.hop_rows[hop], edge);
    largest_edge = std::max(largest_edge, edge * static_cast<double>(given.row_bytes));
  }
  p.levels = std::move(given.levels);
  p.level_us = there.level_us;
  const uint32_t largest = moe_pipeline_chunks(static_cast<uint64_t>(largest_edge));
  MoePrice best;
  for (uint32_t chunks = 1; chunks <= largest; chunks *= 2) {
    p.dispatch = cut(there, chunks);
    p.combine = cut(back, chunks);
    p.n_chunks = chunks;
    p.most_chunks = chunks == largest ? kMoePipelineChunks : chunks;
    if (chunks == 1 || p.both_us() < best.both_us()) best = p;
  }
  return best;
}

double MoePrice::total_us(const OneWay& way) const {
  return way.latency_us + std::max(way.link_us, way.copy_us) + std::min(way.link_us, way.copy_us) / n_chunks;
}

bool links_known(const plan::LevelTree& tree) {
  return std::any_of(tree.levels.begin(), tree.levels.end(),
                     [](const plan::Level& l) { return l.link.bytes_per_ns > 0; });
}

HierMoeChoice hiermoe_choice(std::span<const MoePrice> prices, const plan::LevelTree& tree,
                             const plan::Profile& profile, uint64_t row_bytes) {
  HierMoeChoice choice;
  choice.measured = profile.all_to_all.standard.bytes_per_ns > 0;
  const plan::AllToAllCosts costs = choice.measured ? profile.all_to_all : all_to_all_of_links(tree);
  for (const MoePrice& p : prices) {
    const bool known = hiermoe_knows(p.algorithm, costs).ok();
    choice.both_us.push_back(known ? 2 * hiermoe_time(p.algorithm, p.hop_rows, tree, costs, row_bytes).total_ns / 1000
                                   : 0.0);
    const double best = choice.both_us[choice.best], now = choice.both_us.back();
    if (now > 0 && (best == 0 || now < best)) choice.best = choice.both_us.size() - 1;
  }
  return choice;
}

size_t cheapest(std::span<const MoePrice> prices) {
  const auto best = std::min_element(prices.begin(), prices.end(),
                                     [](const MoePrice& a, const MoePrice& b) { return a.both_us() < b.both_us(); });
  return static_cast<size_t>(best - prices.begin());
}

}  // namespace moeccl::algo
