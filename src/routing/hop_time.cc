// SPDX-License-Identifier: Apache-2.0
#include "src/routing/hop_time.h"

#include <algorithm>
#include <bit>

namespace moeccl::algo {

uint32_t moe_pipeline_chunks(uint64_t largest_edge_bytes) {
  const uint64_t useful = std::bit_floor(std::max<uint64_t>(1, largest_edge_bytes / kMoePipelineBytes));
  return static_cast<uint32_t>(std::min<uint64_t>(kMoePipelineChunks, useful));
}

HopTime hop_time(std::span<const double> hop_us, std::span<const double> hop_latency_us, uint32_t chunks) {
  const auto n_hops = std::count_if(hop_latency_us.begin(), hop_latency_us.end(), [](double l) { return l > 0; });
  const double depth = moe_plan_depth(n_hops > 1);
  size_t last = 0;
  for (size_t hop = 0; hop < hop_us.size(); ++hop)
    if (hop_us[hop] > 0 || hop_latency_us[hop] > 0) last = hop;
  HopTime t;
  double all_us = 0, slowest_us = 0, lane_us = 0, period_us = 0;
  for (size_t hop = 0; hop < hop_us.size(); ++hop) {
    const double chunk_us = hop_us[hop] / chunks, latency_us = hop_latency_us[hop];
    all_us += hop_us[hop];
    slowest_us = std::max(slowest_us, hop_us[hop]);
    t.latency_us += latency_us;
    // One lane passes on the rows of all hops after the first: it waits for each hop's rows before the next hop's.
    if (hop >= 1 && hop < last) lane_us += latency_us + chunk_us;
    // A slot can be filled again two latencies after it was filled.
    if (chunks > depth) period_us = std::max(period_us, (2 * latency_us + chunk_us) / depth);
  }
  // The slowest part sets the pace of chunks, because the other waits overlap with it.
  period_us = std::max({period_us, lane_us, slowest_us / chunks});
  t.latency_us += (chunks - 1) * (period_us - slowest_us / chunks);
  t.link_us = slowest_us + (all_us - slowest_us) / chunks;
  return t;
}

}  // namespace moeccl::algo
