// SPDX-License-Identifier: Apache-2.0
#include "plugins/tuner/fabric.h"

#include <algorithm>
#include <cmath>

#include "src/base/format.h"
#include "topology/synthetic.h"

namespace moeccl::tuner {
namespace {

constexpr double kSmallBytes = 8, kLargeBytes = 16 << 20;

// Measured points, where there are any, say more than their line, which several protocols of one link bend.
FabricLevel level_of(const plan::LevelFit& fit, int rails) {
  const plan::Curve& c = fit.curve;
  FabricLevel level{.name = fit.name, .alpha_us = c.line.alpha_ns / 1e3, .bytes_per_us = c.line.bytes_per_ns * 1e3};
  if (c.known()) {
    const double large = std::max(c.points.back().bytes, kLargeBytes);
    const double steady_ns = c.at(large) - c.at(large / 2);
    level.alpha_us = c.at(kSmallBytes) / 1e3;
    if (steady_ns > 0) level.bytes_per_us = large / 2 / steady_ns * 1e3;
  }
  level.bytes_per_us *= rails;
  return level;
}

}  // namespace

std::vector<Crossing> Fabric::crossings(size_t n_hosts) const {
  std::vector<Crossing> crossed;
  const auto n = static_cast<double>(n_hosts);
  double outer = 1;
  for (const FabricLevel& l : levels) {
    // Without sizes every host is a group of every level, and the slowest level counts, so that no estimate is too
    // good.
    const double groups = l.hosts > 0 ? std::ceil(n / l.hosts) : n;
    if (groups <= outer) continue;
    crossed.push_back({l.alpha_us, l.bytes_per_us, groups});
    if (l.hosts > 0) outer = groups;
  }
  return crossed;
}

Result<Fabric> fabric_of(const plan::Profile& profile, std::string_view topology, int rails) {
  if (profile.levels.empty()) {
    return error(moecclInvalidArgument, "it has no measured links (\"levels\"): moeccl calibrate measures them");
  }
  if (profile.host_level < 0) {
    return error(moecclInvalidArgument,
                 "it was measured on one host (host_level -1), and NCCL knows the links within a host: calibrate on "
                 "two hosts or more");
  }
  const auto last = static_cast<size_t>(profile.host_level);
  if (last >= profile.levels.size()) {
    return error(moecclInvalidArgument, "its host_level is {}, but it has {} levels", last, profile.levels.size());
  }
  Fabric fabric;
  for (size_t l = 0; l <= last; ++l) {
    const plan::LevelFit& fit = profile.levels[l];
    FabricLevel level = level_of(fit, rails);
    if (!(level.alpha_us >= 0) || !(level.bytes_per_us > 0) || !std::isfinite(level.alpha_us + level.bytes_per_us)) {
      return error(moecclInvalidArgument, "level \"{}\" has no latency and rate", fit.name);
    }
    if (fit.curve.r2 > 0) fabric.least_r2 = std::min(fabric.least_r2, fit.curve.r2);
    fabric.levels.push_back(std::move(level));
  }
  fabric.levels.back().hosts = 1;
  if (topology.empty() || profile.n_ranks == 0) return fabric;
  const Result<plan::LevelTree> tree = topology::parse_synthetic(topology, profile.n_ranks);
  if (!tree.ok() || tree->depth() <= last) return fabric;
  for (size_t l = 0; l < last; ++l) {
    fabric.levels[l].hosts = static_cast<double>(tree->levels[last].n_groups) / tree->levels[l].n_groups;
  }
  return fabric;
}

}  // namespace moeccl::tuner
