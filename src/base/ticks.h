// SPDX-License-Identifier: Apache-2.0
// The processor's counter, for timing every operation at half the price of clock_gettime: for figures that people read
// and from which plans are chosen. Deadlines use clock.h.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

#include "src/base/clock.h"

namespace moeccl {

class Ticks {
 public:
  static int64_t now() {
    if (scale().counter) return counter();
    return now_ns();
  }
  static int64_t to_ns(int64_t ticks) { return static_cast<int64_t>(static_cast<double>(ticks) * scale().ns_per_tick); }

 private:
  static int64_t counter() {
#if defined(__x86_64__)
    return static_cast<int64_t>(__rdtsc());
#else
    int64_t ticks;
    asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#endif
  }
  struct Scale {
    bool counter = false;  // false: a tick is a nanosecond of the monotonic clock
    double ns_per_tick = 1;
  };
  // x86-64: measures once, at first use, for 0.2 ms. The counter is used only if it runs at one rate in all states of
  // the processor. aarch64: the counter always runs at one rate, which the processor states; CLOCK_MONOTONIC counts the
  // same ticks.
  static Scale measure();
  static const Scale& scale() {
    static const Scale scale = measure();
    return scale;
  }
};

}  // namespace moeccl
