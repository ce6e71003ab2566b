// SPDX-License-Identifier: Apache-2.0
// Decides which of a process's communicators may put next. Their sockets share a line whose queue is in the kernel, and
// what is in that queue cannot be overtaken. A less urgent class is therefore held back before its next put for as long
// as an operation of a more urgent class is moving; a put that is under way goes on. Time is an argument, so that tests
// can bring their own clock. The words are written by the threads of all communicators.
//
// An operation that has moved nothing for kQuiet_ns is waiting for something other than the line, such as a peer that
// is not there yet, and holds no class back. No class starves: a class that is held back may put one chunk each time
// kShare times the chunk's own time on the line has passed, at the rate at which this process has lately put. It thus
// keeps about 1/kShare of the line.
//
// The order covers one process: the ranks of a host that run in several processes each hold back their own operations.
// Operations of one communicator run on all its ranks at once, and so do these holds.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "transport/words.h"

namespace moeccl::transport {

// The chunks of a dispatch are separated by gaps of a round trip plus a queue (20 ms where a shaper queues). A waiting
// executor asks again within half a millisecond.
inline constexpr int64_t kQuiet_ns = 30'000'000;
inline constexpr int64_t kShare = 16;
// A socket takes its first megabytes at memory speed, so only longer windows say something about the line.
inline constexpr int64_t kRateWindow_ns = 200'000'000;
inline constexpr uint64_t kFirstRate = 125'000;  // bytes per ms before anything was put: 1 Gbit/s

struct PutOrder {
  struct alignas(kLine) Class {
    std::atomic<int32_t> running{0};   // operations under way
    std::atomic<int64_t> moved_ns{0};  // when one of them last moved something
    std::atomic<int64_t> held_ns{0};   // since when the class is held back, or last put despite that; 0: not held
    std::atomic<uint64_t> bytes{0}, bytes_beside{0};  // admitted; those admitted despite a more urgent class
  };
  Class of[kTrafficClasses];
  struct alignas(kLine) {
    std::atomic<int64_t> begin_ns{0};
    std::atomic<uint64_t> bytes{0};
    std::atomic<uint64_t> bytes_per_ms{kFirstRate};
  } window;
};

PutOrder& process_put_order();

inline uint32_t order_class(uint32_t traffic_class) { return std::min(traffic_class, kTrafficClasses - 1); }

inline void begins(PutOrder& order, uint32_t traffic_class, int64_t now) {
  PutOrder::Class& c = order.of[order_class(traffic_class)];
  c.moved_ns.store(now, std::memory_order_relaxed);
  c.running.fetch_add(1, std::memory_order_relaxed);
}
inline void ends(PutOrder& order, uint32_t traffic_class) {
  order.of[order_class(traffic_class)].running.fetch_sub(1, std::memory_order_relaxed);
}
inline void moves(PutOrder& order, uint32_t traffic_class, int64_t now) {
  order.of[order_class(traffic_class)].moved_ns.store(now, std::memory_order_relaxed);
}

inline bool more_urgent_moves(const PutOrder& order, uint32_t traffic_class, int64_t now) {
  for (uint32_t c = order_class(traffic_class) + 1; c < kTrafficClasses; ++c) {
    if (order.of[c].running.load(std::memory_order_relaxed) > 0 &&
        now - order.of[c].moved_ns.load(std::memory_order_relaxed) < kQuiet_ns)
      return true;
  }
  return false;
}

inline void note_rate(PutOrder& order, uint64_t bytes, int64_t now) {
  const int64_t begin = order.window.begin_ns.load(std::memory_order_relaxed), passed = now - begin;
  if (passed < kRateWindow_ns) {
    order.window.bytes.fetch_add(bytes, std::memory_order_relaxed);
    return;
  }
  const uint64_t rate =
      order.window.bytes.exchange(bytes, std::memory_order_relaxed) / static_cast<uint64_t>(passed / 1'000'000);
  order.window.begin_ns.store(now, std::memory_order_relaxed);
  // A window with little demand says little about the line, so the rate falls by at most 1/8.
  const uint64_t before = order.window.bytes_per_ms.load(std::memory_order_relaxed);
  if (begin != 0) order.window.bytes_per_ms.store(std::max(rate, before - before / 8), std::memory_order_relaxed);
}

// Returns whether a put of this many bytes may begin, and counts it if so.
inline bool may_go(PutOrder& order, uint32_t traffic_class, uint64_t bytes, int64_t now) {
  PutOrder::Class& c = order.of[order_class(traffic_class)];
  const bool beside = more_urgent_moves(order, traffic_class, now);
  if (beside) {
    const int64_t since = c.held_ns.load(std::memory_order_relaxed);
    const uint64_t rate = std::max<uint64_t>(1, order.window.bytes_per_ms.load(std::memory_order_relaxed));
    if (since == 0) c.held_ns.store(now, std::memory_order_relaxed);
    if (since == 0 || now - since < kShare * static_cast<int64_t>(bytes * 1'000'000 / rate)) return false;
    c.held_ns.store(now, std::memory_order_relaxed);
    c.bytes_beside.fetch_add(bytes, std::memory_order_relaxed);
  } else if (c.held_ns.load(std::memory_order_relaxed) != 0) {
    c.held_ns.store(0, std::memory_order_relaxed);
  }
  c.bytes.fetch_add(bytes, std::memory_order_relaxed);
  note_rate(order, bytes, now);
  return true;
}

}  // namespace moeccl::transport
