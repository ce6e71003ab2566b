// SPDX-License-Identifier: Apache-2.0
#include "src/plan/long_line.h"

#include <algorithm>
#include <bit>

namespace moeccl::plan {

LongLine long_line(const LevelTree& tree, const Profile& profile) {
  constexpr double kMost = 1e15;  // figures of a topology text have no limit
  LongLine longest;
  for (uint32_t l = 0; l < tree.depth(); ++l) {
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
  return std::max(usual, std::min(wanted, kMostOfHost / std::max(1u, ranks_on_host)));
}

}  // namespace moeccl::plan
