// SPDX-License-Identifier: Apache-2.0
#include "src/select/routing_price.h"

#include <algorithm>
#include <numeric>

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

// Returns how long it takes until every rank of a core has had it; 0: they have one each.
double turn_us(const plan::LevelTree& tree, const plan::Profile& profile) {
  const auto [ranks, cores] = host_of(tree, profile);
  return ranks > cores ? ranks / cores * profile.switch_ns / 1000 : 0;
}

// How often each of the ranks that share a core takes it to begin and to end an operation. 8 ranks on 2 cores need 58
// us more than their copies, links and turns between hops for 4 tokens, whatever the plan (docs/decisions, 170).
constexpr double kTurnsToBegin = 6;

// How fast a core moves the rows of all its ranks, as the clock of cost.h does: ranks of a host share its memory.
struct Rates {
  double copy, reduce;  // bytes per ns
};
Rates rates_of(const plan::LevelTree& tree, const plan::Profile& profile, double bytes_of_rank) {
  const auto [ranks, cores] = host_of(tree, profile);
  if (bytes_of_rank * ranks <= static_cast<double>(profile.cache_bytes) * cores)
    return {profile.cached_copy_bytes_per_ns, profile.cached_reduce_bytes_per_ns};
  return {std::min(profile.copy_bytes_per_ns, profile.host_copy_bytes_per_ns / cores), profile.reduce_bytes_per_ns};
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

// Returns whether a rank sends to one rank of each other group at a level, not to all of their ranks.
bool sends_to_one(const MoeAlgorithm& algorithm, uint32_t level) {
  return algorithm.kind == PathKind::kHier ? level + 1 < algorithm.dims
                                           : algorithm.kind == PathKind::k2dh && level == 0;
}

// Returns to how many ranks of other groups at a level a rank sends.
double peers_across(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, uint32_t level) {
  const double above = level == 0 ? 1.0 : tree.levels[level - 1].n_groups;
  const double siblings = tree.levels[level].n_groups / above - 1;
  return siblings *
         (sends_to_one(algorithm, level) ? 1.0 : static_cast<double>(tree.n_ranks) / tree.levels[level].n_groups);
}

// Returns the rows of the largest transfer between two ranks at a level, from the load of the busiest group, whose
// ranks share the load evenly.
double edge_rows(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const LevelLoad& load, uint32_t level) {
  const double peers = peers_across(algorithm, tree, level);
  const double ranks = static_cast<double>(tree.n_ranks) / tree.levels[level].n_groups;
  return peers > 0 ? load.busiest / (ranks * peers) : 0.0;
}

// One way of the rows: what each hop takes, without the overlap of chunks.
struct Way {
  std::vector<double> level_us;  // the busiest group's bytes on its uplink
  std::vector<HopLoad> hops;     // in the order in which rows take them
  double unpack_us = 0, waiting_part = 1, ranks = 1, turn_us = 0;
  bool returns = false;

  WayTime time(uint32_t chunks) const {
    return way_time({hops, unpack_us, waiting_part, ranks, turn_us, returns}, chunks);
  }
};

// Returns what the links of each hop take, and the rows that a rank sends in it.
Way links_of(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile,
             uint64_t row_bytes, std::span<const LevelLoad> loads, std::vector<double>& sent) {
  const auto [ranks, cores] = host_of(tree, profile);
  Way way;
  way.ranks = ranks / cores;
  way.turn_us = turn_us(tree, profile);
  way.hops.resize(algorithm.kind == PathKind::kHier ? algorithm.dims : algorithm.kind == PathKind::k2dh ? 2 : 1);
  sent.assign(way.hops.size(), 0);
  std::vector<double> peers(way.hops.size(), 0);
  for (uint32_t l = 0; l < tree.depth(); ++l) {
    const plan::LinkCost link = plan::link_of(tree, profile, l);
    const double us =
        link.bytes_per_ns > 0 ? loads[l].busiest * static_cast<double>(row_bytes) / link.bytes_per_ns / 1000 : 0.0;
    way.level_us.push_back(us);
    const uint32_t at = hop_of(algorithm, l);
    HopLoad& hop = way.hops[at];
    const double across = peers_across(algorithm, tree, l);
    if (across == 0) continue;
    if (us >= hop.link_us) {
      hop.link_us = us;
      hop.group = static_cast<double>(tree.n_ranks) / tree.levels[l].n_groups;
      hop.in_turn = sends_to_one(algorithm, l);
      hop.sharers = std::clamp(hop.group / cores, 1.0, way.ranks);
      hop.crossed_part = 1 / (across * hop.sharers);
    }
    // Ranks wait for each other's signals even where no rows come with them.
    hop.latency_us = std::max(hop.latency_us, link.alpha_ns / 1000);
    sent[at] += static_cast<double>(loads[l].rows) / tree.n_ranks;
    peers[at] += across;
  }
  for (size_t h = 0; h < way.hops.size(); ++h)
    if (peers[h] > 0) way.hops[h].packed_part = 1 / peers[h];
  return way;
}

// Rows are gathered into each hop's slots and, at their experts, spread into Output. A later hop gathers from what all
// hops before it brought, and signals when all of that is done.
Way dispatch_of(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile,
                const MoeRows& rows) {
  std::vector<double> sent;
  Way way = links_of(algorithm, tree, profile, rows.row_bytes, rows.levels, sent);
  const auto row_bytes = static_cast<double>(rows.row_bytes);
  const Rates rates = rates_of(tree, profile, std::accumulate(sent.begin(), sent.end(), rows.delivered) * row_bytes);
  const double row_us = way.ranks * row_bytes / rates.copy / 1000;
  double holders = rows.tokens;
  for (size_t h = 0; h < way.hops.size(); ++h) {
    HopLoad& hop = way.hops[h];
    hop.pack_us = sent[h] * row_us;
    if (h > 0) {
      hop.packed_part = 1;
      way.hops[h - 1].crossed_part = 1;
      hop.waiting_part = holders > 0 && sent[h - 1] > 0 ? sent[h - 1] / holders : 1;
    }
    holders += sent[h];
  }
  way.unpack_us = rows.delivered * row_us;
  way.waiting_part = holders > 0 ? sent.back() / holders : 1;
  return way;
}

// Each holder of a row sums what came back for it by later hops with what its own experts give, and returns the sum by
// the hop that brought the row.
Way combine_of(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile,
               const MoeRows& rows) {
  std::vector<double> sent;
  Way way =
      links_of(algorithm, tree, profile, rows.row_bytes, rows.returned.empty() ? rows.levels : rows.returned, sent);
  const auto row_bytes = static_cast<double>(rows.row_bytes);
  const Rates rates = rates_of(tree, profile, std::accumulate(sent.begin(), sent.end(), rows.delivered) * row_bytes);
  const auto sum_us = [&](double written, double read) {
    return way.ranks * row_bytes * std::max(read / rates.reduce, written / rates.copy) / 1000;
  };
  // A hop sends the same share of the rows of every holder, old or new, and experts get the same number of each.
  std::vector<double> share(way.hops.size());
  double holders = rows.tokens;
  for (size_t h = 0; h < way.hops.size(); ++h) {
    share[h] = holders > 0 ? sent[h] / holders : 0;
    holders += sent[h];
  }
  double terms = holders > 0 ? rows.delivered / holders : 0;
  for (size_t h = way.hops.size(); h-- > 0;) {
    way.hops[h].pack_us = sum_us(sent[h], sent[h] * terms);
    way.hops[h].crossed_part = 1;
    terms += share[h];
  }
  way.unpack_us = sum_us(rows.tokens, rows.tokens * terms);
  way.returns = true;
  std::reverse(way.hops.begin(), way.hops.end());
  return way;
}

}  // namespace

MoePrice price(const MoeAlgorithm& algorithm, const plan::LevelTree& tree, const plan::Profile& profile,
               MoeRows given) {
  MoePrice p;
  p.algorithm = algorithm;
  p.begin_us = kTurnsToBegin * turn_us(tree, profile);
  const Way there = dispatch_of(algorithm, tree, profile, given), back = combine_of(algorithm, tree, profile, given);
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
    p.dispatch = there.time(chunks);
    p.combine = back.time(chunks);
    p.n_chunks = chunks;
    p.most_chunks = chunks == largest ? kMoePipelineChunks : chunks;
    if (chunks == 1 || p.both_us() < best.both_us()) best = p;
  }
  return best;
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
