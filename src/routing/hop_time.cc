// SPDX-License-Identifier: Apache-2.0
#include "src/routing/hop_time.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace moeccl::algo {

uint32_t moe_pipeline_chunks(uint64_t largest_edge_bytes) {
  const uint64_t useful = std::bit_floor(std::max<uint64_t>(1, largest_edge_bytes / kMoePipelineBytes));
  return static_cast<uint32_t>(std::min<uint64_t>(kMoePipelineChunks, useful));
}

namespace {

// A core that packs or sums, or an uplink, and what it has to do for one chunk of all ranks of a core.
struct Stage {
  double all_us = 0;
  double first_us = 0;  // until the next stage can begin
  double last_us = 0;   // after the stage before has ended
  double late_us = 0;   // until an uplink begins whose ranks come last to their core
};

// The rows of a hop in turn cross its uplink rank by rank, while those of the hop beside it cross uplinks that serve
// fewer ranks. Returns which part of a chunk has crossed when the last of these uplinks begins or, in combine, is to
// cross when the last of them has ended: the rows of all ranks but those that this one serves, and of one of them.
double turns_part(const HopLoad& hop, const HopLoad& beside) {
  return std::clamp(1 - (beside.group - 1) / hop.group, 1 / hop.group, 1.0);
}

// Returns the part of a chunk on an uplink after which the next stage can begin.
double first_part(const RowWay& way, size_t at) {
  const HopLoad& hop = way.hops[at];
  if (hop.crossed_part < 1 || at + 1 == way.hops.size()) return hop.crossed_part;
  const HopLoad& next = way.hops[at + 1];
  if (way.returns) return next.in_turn ? 1 / hop.group : 1.0;
  return hop.in_turn ? turns_part(hop, next) : 1.0;
}

// Returns the part of a chunk that is still to cross an uplink when the stage before has ended.
double last_part(const RowWay& way, size_t at) {
  const HopLoad& hop = way.hops[at];
  if (at > 0 && way.returns && hop.in_turn) return hop.packed_part * turns_part(hop, way.hops[at - 1]);
  const bool in_turn = at > 0 && !way.returns && way.hops[at - 1].in_turn;
  return hop.packed_part / (in_turn ? hop.group : hop.sharers);
}

std::vector<Stage> stages_of(const RowWay& way, uint32_t chunks) {
  std::vector<Stage> stages;
  stages.reserve(2 * way.hops.size() + 1);
  double ready = way.ranks, arrived_part = 1;  // the ranks of a core that get rows at the same time
  for (size_t i = 0; i < way.hops.size(); ++i) {
    const HopLoad& hop = way.hops[i];
    const double rank_us = hop.waiting_part * hop.pack_us / (way.ranks * chunks), link_us = hop.link_us / chunks;
    stages.push_back({way.ranks * rank_us, hop.packed_part * rank_us, ready * arrived_part * rank_us});
    stages.push_back({link_us, first_part(way, i) * link_us, last_part(way, i) * link_us,
                      std::max(0.0, ready - hop.sharers) * rank_us});
    ready = hop.sharers;
    arrived_part = hop.crossed_part;
  }
  const double rank_us = way.waiting_part * way.unpack_us / (way.ranks * chunks);
  stages.push_back({way.ranks * rank_us, 0, ready * arrived_part * rank_us});
  return stages;
}

// The stage that takes longest, with what comes before its first rows and after its last ones.
struct LongestStage {
  double first_us = 0;  // until the first rows are at the last stage
  double chunk_us = 0;  // one chunk
  double links_us = 0;  // all chunks on one uplink
};
LongestStage longest_stage(const RowWay& way, uint32_t chunks) {
  const std::vector<Stage> stages = stages_of(way, chunks);
  const uint32_t at_once = std::min(chunks, moe_plan_depth(way.hops.size() > 1));  // a rank fills all of its slots
  LongestStage t;
  double after_us = 0;
  for (const Stage& stage : stages) after_us += stage.last_us;
  for (size_t s = 0; s < stages.size(); ++s) {
    const Stage& stage = stages[s];
    after_us = std::max(0.0, after_us - stage.last_us);
    const double around_us = t.first_us + after_us;
    t.chunk_us = std::max(t.chunk_us, around_us + stage.late_us + stage.all_us);
    if (s % 2 == 1) t.links_us = std::max(t.links_us, around_us + at_once * stage.late_us + chunks * stage.all_us);
    t.first_us += stage.first_us;
  }
  return t;
}

}  // namespace

WayTime way_time(const RowWay& way, uint32_t chunks) {
  WayTime t;
  double lane_us = 0;
  t.core_us = way.unpack_us + way.turn_us * chunks * static_cast<double>(way.hops.size() + 1);
  for (size_t h = 0; h < way.hops.size(); ++h) {
    const HopLoad& hop = way.hops[h];
    t.core_us += hop.pack_us;
    t.latency_us += hop.latency_us + way.turn_us;
    t.link_us = std::max(t.link_us, hop.link_us);
    const size_t alone = way.returns ? 0 : 1;  // hops before the first one of the shared lane
    if (h >= alone && h + 2 < way.hops.size() + alone) lane_us += hop.latency_us + way.turn_us + hop.link_us / chunks;
  }
  const LongestStage longest = longest_stage(way, chunks);
  const double chunk_us = std::max(t.core_us / chunks, t.latency_us + longest.chunk_us);
  const double pace_us = std::max({t.link_us / chunks, t.core_us / chunks, lane_us});
  const uint32_t depth = moe_plan_depth(way.hops.size() > 1), rounds = (chunks - 1) / depth;
  // Dispatch gives a slot back when its rows have been passed on, combine when all later hops have come back.
  double slot_us = 0, rest_us = t.latency_us;
  for (size_t h = 0; h < way.hops.size(); ++h) {
    const double latency_us = way.hops[h].latency_us + way.turn_us;
    slot_us = std::max(slot_us, latency_us + (way.returns ? rest_us : latency_us + (h == 0 ? lane_us : 0)));
    rest_us -= latency_us;
  }
  slot_us += longest.first_us;
  t.total_us = rounds * std::max(slot_us, depth * pace_us) + (chunks - 1 - rounds * depth) * pace_us + chunk_us;
  t.total_us = std::max(t.total_us, t.latency_us + longest.links_us);
  return t;
}

}  // namespace moeccl::algo
