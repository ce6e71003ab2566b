// SPDX-License-Identifier: Apache-2.0
// Decides which transfer may use an uplink next: transfers of several communicators share a group's uplink, and the
// higher class goes first, chunk by chunk. The functions are pure: the caller supplies the time and the words.
//
// A transfer is admitted when the traffic already on the uplink will have crossed soon (kWindow_ns) and no higher class
// is waiting. A more urgent transfer that comes later thus never waits for more than that window and the transfer in
// front. A refused transfer leaves a claim, which holds for kClaim_ns and is renewed by asking again. Lower classes do
// not starve: a class that waits is owed a share of 1/kShare of what crosses before it, and goes as soon as that covers
// its own transfer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "transport/transport.h"

namespace moeccl::transport::paced {

// Waiting executors sleep for at most half a millisecond (exec/task.cc), so the uplink stays busy within the window,
// and they have asked again before a claim expires.
inline constexpr int64_t kWindow_ns = 1'000'000;
inline constexpr int64_t kClaim_ns = 3'000'000;
inline constexpr int64_t kShare = 16;

struct Transfer {
  uint32_t traffic_class = 0;
  int64_t duration_ns = 0;
};

// Returns when an uplink will be free. Any rank can write the word: a value far in the future makes others wait until
// their timeout, and must not make the sums below overflow.
inline int64_t free_at(const UplinkWords& uplink) {
  constexpr int64_t kFarthest = INT64_MAX / 4;
  return std::clamp(uplink.free_ns.load(std::memory_order_relaxed), int64_t{0}, kFarthest);
}

inline bool higher_waits(const UplinkWords& uplink, uint32_t traffic_class, int64_t now) {
  for (uint32_t c = traffic_class + 1; c < kTrafficClasses; ++c)
    if (uplink.claim_ns[c].load(std::memory_order_relaxed) > now) return true;
  return false;
}

// Returns whether the transfer may take the uplink now. If not, a claim is left and the caller asks again.
inline bool may_go(UplinkWords& uplink, const Transfer& t, int64_t now) {
  const bool soon = free_at(uplink) - now <= kWindow_ns;
  const bool owed = uplink.owed_ns[t.traffic_class].load(std::memory_order_relaxed) >= t.duration_ns;
  if (soon && (owed || !higher_waits(uplink, t.traffic_class, now))) return true;
  uplink.claim_ns[t.traffic_class].store(now + kClaim_ns, std::memory_order_relaxed);
  return false;
}

// Notes that the transfer takes the uplink: what others are now owed, and what it used of what it was owed itself.
inline void went(UplinkWords& uplink, const Transfer& t, int64_t now) {
  for (uint32_t c = 0; c < t.traffic_class; ++c) {
    if (uplink.claim_ns[c].load(std::memory_order_relaxed) > now)
      uplink.owed_ns[c].fetch_add(t.duration_ns / kShare, std::memory_order_relaxed);
  }
  std::atomic<int64_t>& owed = uplink.owed_ns[t.traffic_class];
  if (higher_waits(uplink, t.traffic_class, now)) {
    owed.fetch_sub(t.duration_ns, std::memory_order_relaxed);
  } else {
    owed.store(0, std::memory_order_relaxed);  // nothing more urgent is waiting
  }
}

// Reserves `duration` from `earliest` on and returns its end.
inline int64_t reserve(UplinkWords& uplink, int64_t earliest, int64_t duration) {
  int64_t free = uplink.free_ns.load(std::memory_order_relaxed);
  int64_t end = 0;
  do {
    end = std::max(std::clamp(free, int64_t{0}, INT64_MAX / 4), earliest) + duration;
  } while (!uplink.free_ns.compare_exchange_weak(free, end, std::memory_order_relaxed));
  return end;
}

}  // namespace moeccl::transport::paced
