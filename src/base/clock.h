// SPDX-License-Identifier: Apache-2.0
// The clocks, and deadlines for waits.
#pragma once

#include <ctime>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace moeccl {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Nanoseconds since 1970, for people and for comparing hosts: the clock may be set back.
inline int64_t unix_ns() {
  timespec t;
  clock_gettime(CLOCK_REALTIME, &t);
  return int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

struct Deadline {
  int64_t at_ns = std::numeric_limits<int64_t>::max();

  static Deadline never() { return {}; }
  // A negative `ms` gives a deadline that has already passed; one beyond the clock's range gives never().
  static Deadline after_ms(int64_t ms) {
    const int64_t now = now_ns();
    constexpr int64_t kNsPerMs = 1'000'000;
    if (ms >= (std::numeric_limits<int64_t>::max() - now) / kNsPerMs) return never();
    return {now + std::max<int64_t>(ms, 0) * kNsPerMs};
  }
  static Deadline earlier(Deadline a, Deadline b) { return {std::min(a.at_ns, b.at_ns)}; }

  bool is_never() const { return at_ns == std::numeric_limits<int64_t>::max(); }
  bool passed() const { return !is_never() && now_ns() >= at_ns; }
  // Rounded up; 0 when it has passed. after_ms() makes the same deadline of it.
  int64_t left_ms() const {
    if (is_never()) return at_ns;
    return std::max<int64_t>(at_ns - now_ns() + 999'999, 0) / 1'000'000;
  }
  // The timeout for poll() and epoll_wait(). It is rounded up, so that a wait never ends just before the deadline and
  // then spins. never() gives an hour instead of -1, so that every wait wakes up and checks again.
  int remaining_ms() const {
    constexpr int kLongestMs = 3'600'000;
    return static_cast<int>(std::min<int64_t>(left_ms(), kLongestMs));
  }
};

}  // namespace moeccl
