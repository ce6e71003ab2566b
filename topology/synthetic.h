// SPDX-License-Identifier: Apache-2.0
// Topologies written as text, such as "dc:2(bw=1.25GB/s,lat=5ms) node:4 gpu:8".
//
//   text   = level { space level }               outermost first, at most 8; the last level is the ranks
//   level  = name ":" sizes [ "(" link ")" ]
//   sizes  = number { "+" number }               groups in each group of the level above: one number for all of them,
//                                                or one for each: "node:3 gpu:1+4+3", "dc:2 node:1+2 gpu:4+1+3"
//   link   = item { "," item }                   of each group of the level, in each direction
//   item   = "bw=" decimal (B/s KB/s MB/s GB/s TB/s Mbit/s Gbit/s) | "lat=" decimal (ns us ms s)
#pragma once

#include <string>
#include <string_view>

#include "src/base/status.h"
#include "src/plan/levels.h"

namespace moeccl::topology {

inline constexpr uint32_t kMaxLevels = 8;

// n_ranks is the expected number of ranks; 0 if the text alone determines it. Errors name the position (from 1) and
// what is accepted there.
Result<plan::LevelTree> parse_synthetic(std::string_view text, uint32_t n_ranks);

// Returns the text of a tree. parse_synthetic() turns it back into the same tree, with links equal to the bit, if the
// groups hold consecutive ranks. Where they do not, the level lists them, which parse_synthetic() refuses:
// "island:2[0,2 1,3] rank:2".
std::string to_synthetic(const plan::LevelTree& tree);

}  // namespace moeccl::topology
