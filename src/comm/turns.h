// SPDX-License-Identifier: Apache-2.0
// Turns by ticket: calls run in the order in which they were made, on whatever thread. A thread that has waited for the
// end of the last turn may destroy this object at once, although the thread that ended it may not have returned from
// end() yet.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

#include "src/driver/fork_page.h"

namespace moeccl::comm {

class Turns {
 public:
  // Takes a ticket, whose turn must be waited for and ended. May be called from any thread. A turn that `watches` only
  // waits for a device-side launch and drives nothing itself.
  uint64_t take(bool watches = false) {
    const uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
    if (!watches) after_driven_.store(ticket + 1, std::memory_order_relaxed);
    return ticket;
  }
  // Takes one for work that is put on a stream. The work calls begin() first; if that returns false, it has no turn.
  uint64_t take_queued(bool watches = false) {
    const uint64_t ticket = take(watches);
    if ((queued_.fetch_add(1, std::memory_order_relaxed) & kClosed) == 0) return ticket;
    const std::lock_guard lock(mutex_);
    skipped_.fetch_add(1, std::memory_order_relaxed);
    turn_.notify_all();
    return ticket;
  }
  bool begin() { return (queued_.fetch_sub(1, std::memory_order_relaxed) & kClosed) == 0; }
  // For an abort, on any thread: from now on no turn is waited for, and those of queued work that has not begun never
  // come. Its stream may be busy with the work of another communicator for long.
  void close() {
    if (!birth_.here()) return;
    const std::lock_guard lock(mutex_);
    const uint64_t queued = queued_.fetch_or(kClosed, std::memory_order_relaxed);
    if ((queued & kClosed) != 0) return;
    skipped_.store(queued, std::memory_order_relaxed);
    turn_.notify_all();
  }

  // Waits until the turns of all earlier tickets have ended. It needs no deadline, because each of those operations has
  // one, counted from when it depends on other ranks. In a forked child, where no thread ends them, it does not wait;
  // the communicator refuses the next call there. Returns false after close() if the turn has not come: others may
  // still be in theirs.
  bool wait(uint64_t ticket) {
    bool came = is_turn(state_.load(std::memory_order_acquire), ticket);  // pairs with end()'s release
    if (came) return true;
    wait_until([&] {
      came = is_turn(state_.load(std::memory_order_acquire), ticket);  // as above
      return came || closed();
    });
    return came || !birth_.here();
  }
  // Waits until the turns of all tickets so far have ended, as far as they come, or until `given_up`, which is asked
  // now and then and may be empty, returns true.
  void wait_idle(const std::function<bool()>& given_up = {}) {
    const uint64_t taken = next_.load(std::memory_order_relaxed);
    wait_until([&] { return closed() ? idle() : ended() >= taken; }, given_up);
  }

  // Without waiters, the exchange is this thread's last access to the object. With waiters, the turn changes under the
  // lock that they need to see it.
  void end() {
    uint64_t state = state_.load(std::memory_order_relaxed);
    while (state < kWaiter) {
      if (state_.compare_exchange_weak(state, state + 1, std::memory_order_release, std::memory_order_relaxed)) return;
    }
    if (!birth_.here()) return;
    const std::lock_guard lock(mutex_);
    state_.fetch_add(1, std::memory_order_release);
    turn_.notify_all();
  }

  // Returns true if every ticket's turn has ended.
  bool idle() const {
    return ended() + skipped_.load(std::memory_order_relaxed) == next_.load(std::memory_order_relaxed);
  }
  // Returns true if all remaining turns, if any, only watch.
  bool only_watches() const { return ended() >= after_driven_.load(std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kWaiter = uint64_t{1} << 48, kClosed = uint64_t{1} << 63;
  static bool is_turn(uint64_t state, uint64_t ticket) { return state % kWaiter == ticket; }
  uint64_t ended() const { return state_.load(std::memory_order_acquire) % kWaiter; }
  bool closed() const { return (queued_.load(std::memory_order_relaxed) & kClosed) != 0; }
  template <class Done>
  void wait_until(Done done, const std::function<bool()>& given_up = {}) {
    constexpr std::chrono::milliseconds kAskEvery{20};
    if (done() || !birth_.here()) return;
    std::unique_lock lock(mutex_);
    state_.fetch_add(kWaiter, std::memory_order_relaxed);
    if (given_up) {
      while (!turn_.wait_for(lock, kAskEvery, done) && !given_up()) {
      }
    } else {
      turn_.wait(lock, done);
    }
    state_.fetch_sub(kWaiter, std::memory_order_relaxed);
  }

  std::atomic<uint64_t> next_{0}, after_driven_{0};
  std::atomic<uint64_t> queued_{0};   // tickets of work that has not begun; with kClosed after close()
  std::atomic<uint64_t> skipped_{0};  // tickets whose turns never come
  std::atomic<uint64_t> state_{0};    // the ticket whose turn it is, and kWaiter times the number of waiting threads
  const driver::Birth birth_;
  std::mutex mutex_;
  std::condition_variable turn_;
};

// One turn, from its start to the end of the scope.
class Turn {
 public:
  Turn(Turns& turns, uint64_t ticket) : turns_(turns), came_(turns_.wait(ticket)) {}
  ~Turn() { turns_.end(); }
  bool came() const { return came_; }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  Turns& turns_;
  const bool came_;
};

}  // namespace moeccl::comm
