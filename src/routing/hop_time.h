// SPDX-License-Identifier: Apache-2.0
// The time of rows that pass from hop to hop, chunk by chunk (moe_plan.h): which copies, links and waits follow one
// another and which overlap. The choice of a layer's algorithm and the solver of expert domains share this formula.
#pragma once

#include <cstdint>
#include <span>

namespace moeccl::algo {

// A long transfer is cut into chunks, so that hops overlap: with C chunks, 1/C of the fan-out is not hidden. Below
// kMoePipelineBytes for one peer, the signals cost more than the overlap gains.
inline constexpr uint32_t kMoePipelineChunks = 8;
inline constexpr uint64_t kMoePipelineBytes = 64 << 10;
uint32_t moe_pipeline_chunks(uint64_t largest_edge_bytes);

// With more than one hop, a third rotation keeps the outer link busy while one chunk is summed and one is on the wire.
inline uint32_t moe_plan_depth(bool several_hops) { return several_hops ? 3 : 2; }

// What the rows of one hop take, all chunks together. The ranks of a core take turns, so that some pack while the rows
// of others are under way.
struct HopLoad {
  double link_us = 0;     // the bytes on the busiest uplink
  double latency_us = 0;  // of a signal, one way
  double pack_us = 0;     // one core's time to pack or sum the rows that its ranks send
  // 1 where rows go on only when all of a chunk's are there. Less where peers have signals of their own:
  double packed_part = 1;   // of what one rank packs, after which the link begins
  double crossed_part = 1;  // of what the uplink carries, after which the next core begins
  double waiting_part = 1;  // of the packing, for rows that the hop before brings
  double sharers = 1;       // ranks of one core that use the same uplink
  double group = 1;         // ranks of all cores that use it
  bool in_turn = false;     // each of them has one peer in another group, so that their rows arrive one after another
};
// One way of rows: dispatch, or combine, which takes dispatch's hops backwards.
struct RowWay {
  std::span<const HopLoad> hops;  // in the order in which rows take them
  double unpack_us = 0;           // one core's time to spread or sum the rows that its ranks receive
  double waiting_part = 1;        // of that, for rows that the last hop brings
  double ranks = 1;               // of one core
  double turn_us = 0;             // until each of them has had the core
  bool returns = false;           // this is combine
};
struct WayTime {
  double total_us = 0;
  double latency_us = 0;  // of the hops, which wait for one another
  double link_us = 0;     // of the slowest hop
  double core_us = 0;     // of one core, for all its ranks, with their turns
};
// - A chunk goes through stages: a core packs, the link carries, the next core packs or unpacks. A stage cannot begin
//   before the first rows have come through the stages before it, and its last rows still go through those after it.
//   The stage with the greatest sum sets the time, and every hop's latency is added. Where the work of all stages that
//   share one core takes longer, links and latencies hide behind it.
// - Ranks of a core take turns at every stage of a chunk, so that chunks are not free.
// - Further chunks follow at the pace of the slowest stage or of the cores. One lane serves all hops but dispatch's
//   first and combine's last (moe_plan.h): it waits for each hop's rows before it passes on the next one's.
// - A slot is filled again once its rows were taken and the sender knows that, so each round of slots waits.
WayTime way_time(const RowWay& way, uint32_t chunks);

}  // namespace moeccl::algo
