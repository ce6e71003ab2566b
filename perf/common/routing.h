// SPDX-License-Identifier: Apache-2.0
// Top-k routings for measurements: made from a seed, or read from a trace (perf/TRACE.md).
#ifndef PERF_COMMON_ROUTING_H_
#define PERF_COMMON_ROUTING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace perf {

// k distinct experts for each token, [n_tokens][k].
struct TopkShape {
  size_t n_tokens;
  int k;
  int n_experts;
};
std::vector<int32_t> uniform_topk(const TopkShape& shape, uint64_t seed);
// Expert popularity ~ 1 / place^exponent, with the experts' places shuffled by `popularity_seed`.
struct Zipf {
  double exponent;
  uint64_t popularity_seed;
};
std::vector<int32_t> zipf_topk(const TopkShape& shape, const Zipf& zipf, uint64_t seed);

// A recorded routing: [n_layers][n_steps][n_tokens][k], see TRACE.md.
struct Trace {
  int n_layers = 0, n_steps = 0, n_tokens = 0, k = 0, n_experts = 0;
  std::vector<int32_t> index;

  const int32_t* step(int layer, int step) const {
    const size_t nth = static_cast<size_t>(layer) * static_cast<size_t>(n_steps) + static_cast<size_t>(step);
    return index.data() + nth * static_cast<size_t>(n_tokens) * static_cast<size_t>(k);
  }
};
// Returns an empty sentence, or the reason why the file cannot be used.
std::string read_trace(const std::string& path, Trace& trace);

}  // namespace perf

#endif  // PERF_COMMON_ROUTING_H_
