// SPDX-License-Identifier: Apache-2.0
// Whether this rank's board holds something that an engine has not told its peers yet.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "transport/common/board_wire.h"

namespace moeccl::transport {

// Any thread; sequentially consistent, because a thread that is about to sleep looks here after it has said so.
class UntoldBoard {
 public:
  void set() { any_.store(true); }
  bool any() const { return any_.load(); }
  // Called before the board is read: what is read includes what was written before a set() that this overwrites.
  void take() { (void)any_.exchange(false); }
  // Returns whether the engine's thread, which calls this at each of its looks, should tell `own` to the peers. The
  // board of a rank that finishes many short operations is left to its signals: words for all peers would take the lock
  // from them. A peer that waits for that board stops this rank within a few operations, and the next look tells it.
  bool due(const Board& own) {
    const uint64_t before = std::exchange(completed_, own.progress.completed.load(std::memory_order_acquire));
    return any() && (completed_ - before < kEntries || state_in(health_word(own)) != 0);
  }

 private:
  std::atomic<bool> any_{false};
  uint64_t completed_ = 0;  // at the last call of due()
};

}  // namespace moeccl::transport
