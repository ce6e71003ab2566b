// SPDX-License-Identifier: Apache-2.0
#include "src/routing/hiermoe_model.h"

#include <algorithm>

namespace moeccl::algo {

namespace {

bool known(const plan::LinkCost& cost) { return cost.bytes_per_ns > 0; }

// Returns U[i]/U[i-1], or G/U[d-1] for the innermost hop: the most ranks that meet in one AlltoAll of a hop.
uint32_t ranks_that_meet(const plan::LevelTree& truncated, uint32_t hop) {
  const plan::Level& level = truncated.levels[hop];
  std::vector<uint32_t> parent_of(level.n_groups, 0), met(level.n_groups, 0);
  if (hop > 0) {
    for (uint32_t r = 0; r < truncated.n_ranks; ++r)
      parent_of[level.group_of_rank[r]] = truncated.levels[hop - 1].group_of_rank[r];
  }
  for (const uint32_t parent : parent_of) ++met[parent];
  return *std::max_element(met.begin(), met.end());
}

}  // namespace

Status hiermoe_knows(const MoeAlgorithm& algorithm, const plan::AllToAllCosts& costs) {
  const uint32_t hops = algorithm.kind == PathKind::kFlat ? 1 : algorithm.kind == PathKind::k2dh ? 2 : algorithm.dims;
  if (hops == 1 && !known(costs.standard))
    return error(moecclUnsupported, "the profile has no alltoall.standard, which {} needs", algorithm.name());
  for (uint32_t i = 1; i < hops; ++i) {
    if (costs.inter.size() < i || !known(costs.inter[i - 1]))
      return error(moecclUnsupported, "the profile has no alltoall.inter[{}], which {} needs", i - 1, algorithm.name());
  }
  if (hops > 1 && (costs.intra.size() < hops - 1 || !known(costs.intra[hops - 2])))
    return error(moecclUnsupported, "the profile has no alltoall.intra[{}], which {} needs", hops - 2,
                 algorithm.name());
  return {};
}

plan::AllToAllCosts all_to_all_of_links(const plan::LevelTree& tree) {
  // The n of Eq. 2, 4 and 5 is a rank's whole buffer, part of which stays within the rank's group of the level. `apart`
  // is the number of ranks of the AlltoAll for each rank in one group.
  const auto share = [&tree](uint32_t level, double apart) {
    plan::AllToAllCosts::Fit cost{tree.levels[level].link};
    cost.bytes_per_ns *= static_cast<double>(tree.levels[level].n_groups) / tree.n_ranks;
    if (apart > 1) cost.bytes_per_ns *= apart / (apart - 1);
    return cost;
  };
  const auto groups = [&tree](uint32_t levels) { return levels == 0 ? 1.0 : tree.levels[levels - 1].n_groups; };
  // An AlltoAll that crosses several levels waits for the slowest of them.
  const auto within = [&](uint32_t first) {
    plan::AllToAllCosts::Fit slowest;
    for (uint32_t l = first; l < tree.depth(); ++l) {
      const plan::AllToAllCosts::Fit cost = share(l, groups(l + 1) / groups(first));
      slowest.alpha_ns = std::max(slowest.alpha_ns, cost.alpha_ns);
      if (known(cost) && (!known(slowest) || cost.bytes_per_ns < slowest.bytes_per_ns))
        slowest.bytes_per_ns = cost.bytes_per_ns;
    }
    return slowest;
  };
  plan::AllToAllCosts costs;
  costs.standard = within(0);
  for (uint32_t l = 0; l + 1 < tree.depth(); ++l) {
    costs.inter.push_back(share(l, groups(l + 1) / groups(l)));
    costs.intra.push_back(within(l + 1));
  }
  return costs;
}

HierMoeTime hiermoe_time(const MoeAlgorithm& algorithm, const Traffic& traffic, const plan::LevelTree& tree,
                         const plan::AllToAllCosts& costs, uint64_t row_bytes) {
  std::vector<double> peak(traffic.n_hops, 0);
  for (const TrafficEdge& e : traffic.edges) peak[e.hop] = std::max(peak[e.hop], static_cast<double>(e.rows));
  return hiermoe_time(algorithm, peak, tree, costs, row_bytes);
}

HierMoeTime hiermoe_time(const MoeAlgorithm& algorithm, std::span<const double> peak_rows, const plan::LevelTree& tree,
                         const plan::AllToAllCosts& costs, uint64_t row_bytes) {
  const auto n_hops = static_cast<uint32_t>(peak_rows.size());
  const plan::LevelTree cut = tree.truncated(n_hops);
  HierMoeTime time;
  for (uint32_t h = 0; h < n_hops; ++h) {
    // 2dh goes inside the node first, so its hop 0 is the innermost level.
    const uint32_t level = algorithm.kind == PathKind::k2dh ? n_hops - 1 - h : h;
    const bool innermost = level + 1 == n_hops;
    const plan::LinkCost& cost = n_hops == 1 ? costs.standard
                                 : innermost ? costs.intra[n_hops - 2]
                                             : costs.inter[level];
    time.hop_bytes.push_back(static_cast<double>(ranks_that_meet(cut, level)) * peak_rows[h] *
                             static_cast<double>(row_bytes));
    time.hop_ns.push_back(cost.alpha_ns + time.hop_bytes.back() / cost.bytes_per_ns);
    time.total_ns += time.hop_ns.back();
  }
  return time;
}

}  // namespace moeccl::algo
