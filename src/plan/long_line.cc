// SPDX-License-Identifier: Apache-2.0
#include "src/plan/long_line.h"

#include <algorithm>
#include <bit>

#include "src/base/format.h"
#include "src/plan/printer.h"

namespace moeccl::plan {

uint32_t far_levels(const LevelTree& tree, std::span<const uint32_t> host_of) {
  constexpr uint32_t kNone = ~0u;
  uint32_t n = 0;
  for (; n < tree.depth(); ++n) {
    // The ranks that meet at a level are those of one group of the level above it.
    std::vector<uint32_t> host_of_group(n > 0 ? tree.levels[n - 1].n_groups : 1, kNone);
    bool join_hosts = false;
    for (uint32_t r = 0; r < tree.n_ranks && !join_hosts; ++r) {
      uint32_t& host = host_of_group[n > 0 ? tree.levels[n - 1].group_of_rank[r] : 0];
      join_hosts = host != kNone && host != host_of[r];
      host = host_of[r];
    }
    if (!join_hosts) break;
  }
  return n;
}

uint32_t far_levels_by_name(const LevelTree& tree) {
  for (uint32_t l = 0; l < tree.depth(); ++l)
    if (tree.levels[l].name == "node" || tree.levels[l].name == "host") return l + 1;
  return tree.depth() > 1 ? 1 : 0;
}

LongLine long_line(const LevelTree& tree, const Profile& profile) {
  constexpr double kMost = 1e15;  // figures of a topology text have no limit
  LongLine longest;
  for (uint32_t l = 0; l < std::min(tree.n_far_levels, tree.depth()); ++l) {
    const LinkCost& link = link_of(tree, profile, l);
    const auto bytes = static_cast<uint64_t>(std::min(2 * link.alpha_ns * link.bytes_per_ns, kMost));
    if (bytes > std::max(kLongLineBytes, longest.bytes)) longest = {l, bytes};
  }
  return longest;
}

uint64_t staging_of_line(const LongLine& line) { return std::bit_ceil(kStagingRoundTrips * line.bytes); }

uint64_t staging_for(const LongLine& line, uint32_t ranks_on_host, uint64_t usual) {
  constexpr uint64_t kMostOfRank = uint64_t{256} << 20, kMostOfHost = uint64_t{1} << 30;
  const uint64_t wanted = std::min(staging_of_line(line), kMostOfRank);
  return std::max(usual, std::min(wanted, std::bit_floor(kMostOfHost / std::max(1u, ranks_on_host))));
}

std::string long_line_text(const LevelTree& tree, const LongLine& line, bool staging_limits, double percent,
                           const std::string& else_text) {
  const std::string text =
      format("long line: level {} holds {} in a round trip; ", tree.levels[line.level].name, bytes_text(line.bytes));
  if (!staging_limits) return text + else_text + "\n";
  return text + format("the staging limits it to {:.0f}%: give MOECCL_STAGING_BYTES of {}\n", percent,
                       bytes_text(staging_of_line(line)));
}

}  // namespace moeccl::plan
