// SPDX-License-Identifier: Apache-2.0
#include "src/base/ticks.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace moeccl {

Ticks::Scale Ticks::measure() {
#if defined(__x86_64__)
  constexpr unsigned kInvariantTsc = 1u << 8;
  constexpr int64_t kMeasure_ns = 200'000;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d & kInvariantTsc) != 0) {
    const int64_t begin_ns = now_ns();
    const auto begin = static_cast<int64_t>(__rdtsc());
    int64_t end_ns = begin_ns;
    while (end_ns - begin_ns < kMeasure_ns) end_ns = now_ns();
    const auto end = static_cast<int64_t>(__rdtsc());
    if (end > begin) return {true, static_cast<double>(end_ns - begin_ns) / static_cast<double>(end - begin)};
  }
#endif
  return {};
}

}  // namespace moeccl
