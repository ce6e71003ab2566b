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
    const auto begin = counter();
    int64_t end_ns = begin_ns;
    while (end_ns - begin_ns < kMeasure_ns) end_ns = now_ns();
    const auto end = counter();
    if (end > begin) return {true, static_cast<double>(end_ns - begin_ns) / static_cast<double>(end - begin)};
  }
#else
  int64_t hz;
  asm("mrs %0, cntfrq_el0" : "=r"(hz));
  if (hz > 0) return {true, 1e9 / static_cast<double>(hz)};
#endif
  return {};
}

}  // namespace moeccl
