// SPDX-License-Identifier: Apache-2.0
// The clock of the benchmarks.
#pragma once

#include <chrono>

namespace perf {

using Clock = std::chrono::steady_clock;

inline double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}
inline double since_ms(Clock::time_point start) { return since_us(start) / 1e3; }

}  // namespace perf
