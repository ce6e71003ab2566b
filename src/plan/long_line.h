// SPDX-License-Identifier: Apache-2.0
// Long lines, as between data centres: so many bytes are under way in a round trip that the usual chunks, and the usual
// staging, leave the line idle for most of the time.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "src/plan/plan.h"
#include "src/plan/profile.h"

namespace moeccl::plan {

// Each of two operations has half of a rank's staging. To keep a line busy it needs the bytes of two and a half round
// trips: those that are under way, and more for the chunks that ranks fill and empty meanwhile. A layer's dispatch,
// with two rotations, needs the most.
inline constexpr uint64_t kStagingRoundTrips = 5;
// From this many bytes in a round trip on, a line is long: the usual 16 MiB of staging no longer suffice for it. A line
// of 50 GB/s with 5 us has 0.5 MB, one with the 30 us that are assumed of a plugin's network 3 MB.
inline constexpr uint64_t kLongLineBytes = (uint64_t{16} << 20) / kStagingRoundTrips;

// Returns how many of the outermost levels join ranks of several hosts, where rank r is on host host_of[r].
uint32_t far_levels(const LevelTree& tree, std::span<const uint32_t> host_of);
// Returns the same by the levels' names, where the ranks' hosts are not known: the levels down to the one named node or
// host, or else the outermost above the ranks. 0: the tree has ranks only, which may share a host.
uint32_t far_levels_by_name(const LevelTree& tree);

// Returns the level whose uplinks have the most bytes in a round trip, by the profile's or the tree's figures. Only
// LevelTree::n_far_levels count.
LongLine long_line(const LevelTree& tree, const Profile& profile);

// Returns a page's line about a long line: "long line: level dc holds 47.68 MiB in a round trip; ...". If the staging
// is too small to keep it busy, `percent` is what it allows; otherwise `else_text` follows.
std::string long_line_text(const LevelTree& tree, const LongLine& line, bool staging_limits, double percent,
                           const std::string& else_text);

// Returns the staging of a rank that keeps the line busy: a power of two, as the chunks of a layer are, which
// would leave a half of 250 MB unused.
uint64_t staging_of_line(const LongLine& line);

// Returns a rank's staging where `usual` is enough for a short line. It grows to a power of two, up to 256 MiB, and up
// to 1 GiB for all ranks of a host.
uint64_t staging_for(const LongLine& line, uint32_t ranks_on_host, uint64_t usual);

}  // namespace moeccl::plan
