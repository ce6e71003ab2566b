// SPDX-License-Identifier: Apache-2.0
// The clock of the benchmarks.
#pragma once

#include <chrono>

namespace perf {

using Clock = std::chrono::steady_clock;

inline double since_us(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

}  // namespace perf
