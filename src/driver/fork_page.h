// SPDX-License-Identifier: Apache-2.0
// Which process this is, counted over forks: what was made before a fork is known in the child, which must not follow
// it. A page that the kernel wipes in children answers with one load, where getpid() would cost a system call in every
// operation.
#pragma once

#include <atomic>
#include <cstdint>

namespace moeccl::driver {

// The number of this process; 0 in a forked child in which nothing was made yet. Never null.
const std::atomic<uint32_t>* process_page();
// The same, from 1 on: a forked child takes another number than its parents had when it first asks.
uint32_t process_number();

// When something was made: in this process, or before it was forked.
class Birth {
 public:
  bool here() const { return page_->load(std::memory_order_relaxed) == number_; }

 private:
  uint32_t number_ = process_number();
  const std::atomic<uint32_t>* page_ = process_page();
};

// One T of each process: made at first use, and anew in a forked child, where another thread of the parent may have
// held the old one's locks. Never destroyed, because threads use it while the program ends.
template <class T>
class PerProcess {
 public:
  T& get() {
    Made* made = made_.load(std::memory_order_acquire);  // pairs with the release in compare_exchange below
    while (made == nullptr || !made->birth.here()) {
      auto* mine = new Made{{}, made, {}};
      if (made_.compare_exchange_strong(made, mine, std::memory_order_acq_rel)) return mine->object;
      delete mine;
    }
    return made->object;
  }
  // Calls body with those of the processes that this one was forked from, until it returns true.
  template <class Body>
  bool any_inherited(Body&& body) {
    for (Made* made = made_.load(std::memory_order_acquire); made != nullptr; made = made->before)
      if (!made->birth.here() && body(made->object)) return true;
    return false;
  }

 private:
  struct Made {
    Birth birth;
    Made* before;  // the parent process's; keeps it in the sight of leak checkers
    T object;
  };
  std::atomic<Made*> made_{nullptr};
};

}  // namespace moeccl::driver
