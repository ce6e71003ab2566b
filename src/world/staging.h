// SPDX-License-Identifier: Apache-2.0
// What decides how large a rank's staging is, where the caller leaves that to the library: the longest line that data
// crosses, and the room that the ranks' hosts have. The segment's shape follows from it.
#pragma once

#include <cstdint>
#include <vector>

#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/bootstrap/bootstrap.h"
#include "src/plan/levels.h"
#include "src/plan/long_line.h"
#include "src/plan/profile.h"
#include "transport/shm/segment.h"

namespace moeccl::comm {

// Returns the profile that MOECCL_PROFILE names, if it can be used for the tree; else one without links. Ranks report a
// file that cannot be used later, when they compare what they have read. `text`, if given, receives the file.
plan::Profile profile_of_variable(const plan::LevelTree& tree, std::string* text = nullptr);

// The ranks that share a limit with this one.
struct Sharers {
  uint32_t on_host = 1, in_process = 1;
  bool several_processes = false;  // on this host
  bool several_hosts = false;
};
// Returns the staging that each of these ranks can have without coming near a limit: of memory (control groups, the
// host), addresses (ulimit -v), files (ulimit -f; a segment needs no /dev/shm) and, for RDMA, of locked memory.
uint64_t room_for_staging(const Sharers& ranks);

// What each rank says before the staging grows, and what all of them agree on: the shortest line, and the least room.
struct LineAndRoom {
  plan::LongLine line;
  uint64_t room = 0;
};
// Collective call.
Result<LineAndRoom> agree_on_line(bootstrap::Session& session, const LineAndRoom& mine, Deadline deadline);

// `line`: the agreed one.
transport::shm::SegmentShape segment_shape(uint32_t n_ranks, uint32_t rank, uint64_t staging_bytes,
                                           const plan::LongLine& line);
// Returns how much of a message goes into a slot, for each peer of the rank that has a segment of this shape.
std::vector<uint64_t> message_bytes(const plan::LevelTree& tree, const plan::LongLine& line,
                                    const transport::shm::SegmentShape& shape);

// Adds to a failure for lack of memory how much staging was tried, and how to have less.
Status with_remedy_of_staging(Status failure, uint64_t staging_bytes);

}  // namespace moeccl::comm
