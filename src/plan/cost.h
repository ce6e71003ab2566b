// SPDX-License-Identifier: Apache-2.0
// Predicts how long a plan takes by running the programs of all ranks on a simulated clock. A rank is one thread that
// works through its lanes. Ranks of a host share its cores and give them up where they wait. A group's uplink carries
// one transfer at a time in each direction. A signal arrives when the bytes put before it have crossed.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "src/plan/binding.h"
#include "src/plan/plan.h"
#include "src/plan/profile.h"

namespace moeccl::plan {

// How the time of the slowest chain of steps is spent.
struct CriticalPath {
  double copy_ns = 0;  // moving bytes, rows included
  double reduce_ns = 0;
  double link_ns = 0;    // latency and occupancy of links, flags included
  double switch_ns = 0;  // one rank waiting for another to give up the core
  double step_ns = 0;    // bookkeeping
  uint32_t last_rank = 0;

  std::string summary() const;  // "62% copying, 30% reducing, 8% links; ends at rank 3"
};

struct Cost {
  double total_ns = 0;
  std::vector<uint64_t>
      level_bytes;  // [depth] bytes of all ranks between different groups of the level, see level_between
  std::vector<double> busiest_ns;    // [depth] how long the level's busiest uplink was sending
  std::vector<uint64_t> sent_bytes;  // [n_ranks] bytes that leave the rank: puts, and what peers read through views
  double lane_busy_ns[4] = {};       // by LaneKind: work of the busiest rank on lanes of that kind
  CriticalPath path;
  uint32_t priced_chunks = 0;  // the other chunks are extrapolated at the pace of the last ones
};

Cost price(const Plan& plan, std::span<const Binding> bindings, const LevelTree& tree, const Profile& profile);
// Does the same for a standard operation of equal blocks.
Cost price(const Plan& plan, const LevelTree& tree, const Profile& profile);

}  // namespace moeccl::plan
