// SPDX-License-Identifier: Apache-2.0
// Lane timelines of all ranks of a run, and figures derived from them.
#ifndef PERF_TENSOR_TIMELINE_H_
#define PERF_TENSOR_TIMELINE_H_

#include <moeccl/pipeline.h>

#include <string>
#include <utility>
#include <vector>

#include "perf/common/team.h"

namespace perf {

struct RankSpan {
  int rank = 0;
  moecclLaneSpan_t span{};
};

// Returns the last run's spans of every rank, the same on all ranks.
std::vector<RankSpan> gather_timeline(const Team& team, size_t count, moecclDataType_t type, uint32_t n_chunks);

struct LaneUse {
  double first_us = 0, last_us = 0;  // of any rank
  double window_us = 0;              // mean over ranks: from its first span's start to its last one's end
  double busy_us = 0;                // mean over groups: time in which some rank of the group used the lane
  bool used = false;
};
// Rank r is in group group_of[r].
LaneUse lane_use(const std::vector<RankSpan>& spans, moecclLaneKind_t lane, const std::vector<int>& group_of);

struct TimelineRow {
  std::string name;
  double total_us = 0;
  std::vector<RankSpan> spans;
};
// Draws one picture: for each row the lanes of rank 0's group, with a bar for each chunk.
std::string timeline_svg(const std::string& title, const std::string& note, const std::vector<TimelineRow>& rows,
                         const std::vector<int>& group_of);
const char* lane_name(moecclLaneKind_t lane);

}  // namespace perf

#endif  // PERF_TENSOR_TIMELINE_H_
