// SPDX-License-Identifier: Apache-2.0
// Figures over samples. Percentiles are nearest-rank, as in nccl-tests.
#ifndef PERF_COMMON_STATS_H_
#define PERF_COMMON_STATS_H_

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

namespace perf {

struct Stats {
  double min = 0, max = 0, mean = 0, p50 = 0, p95 = 0, p99 = 0, stdev = 0;
};

inline double percentile(const std::vector<double>& sorted, size_t percent) {
  const size_t nth = (sorted.size() * percent + 99) / 100;
  return sorted[std::min(sorted.size() - 1, nth == 0 ? 0 : nth - 1)];
}

inline double median(std::vector<double> samples) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const size_t half = samples.size() / 2;
  return samples.size() % 2 == 1 ? samples[half] : (samples[half - 1] + samples[half]) / 2;
}

// samples must not be empty.
inline Stats summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  Stats s;
  s.min = samples.front();
  s.max = samples.back();
  s.p50 = median(samples);
  s.p95 = percentile(samples, 95);
  s.p99 = percentile(samples, 99);
  for (const double x : samples) s.mean += x / static_cast<double>(samples.size());
  double variance = 0;
  for (const double x : samples) variance += (x - s.mean) * (x - s.mean) / static_cast<double>(samples.size());
  s.stdev = std::sqrt(variance);
  return s;
}

}  // namespace perf

#endif  // PERF_COMMON_STATS_H_
