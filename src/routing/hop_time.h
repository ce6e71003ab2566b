// SPDX-License-Identifier: Apache-2.0
// The time of a dispatch's hops that pass rows on chunk by chunk (moe_plan.h). The choice of a layer's algorithm and
// the solver of expert domains share this formula.
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

struct HopTime {
  double link_us = 0;     // of the bytes, without the part that overlaps between hops
  double latency_us = 0;  // of the hops that wait for one another
};
// Returns the time of hops, cut into chunks, whose bytes take hop_us and whose signals take hop_latency_us one way.
HopTime hop_time(std::span<const double> hop_us, std::span<const double> hop_latency_us, uint32_t chunks);

}  // namespace moeccl::algo
