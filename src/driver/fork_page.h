// SPDX-License-Identifier: Apache-2.0
// Tells processes apart across forks. A child inherits what its parent created before the fork, and must be able to
// tell that it belongs to the parent. The kernel wipes one page in children, so a single load answers the question;
// getpid() would cost a system call in every operation.
#pragma once

#include <atomic>
#include <cstdint>

namespace moeccl::driver {

// Points to the number of this process, which is 0 in a forked child until process_number() is first called there.
// Never null.
const std::atomic<uint32_t>* process_page();
// Returns the number of this process, which is at least 1. A forked child gets a number that none of its ancestors has
// when it first calls this.
uint32_t process_number();

// Tells whether something was created in this process or before it was forked.
class Birth {
 public:
  bool here() const { return page_->load(std::memory_order_relaxed) == number_; }

 private:
  uint32_t number_ = process_number();
  const std::atomic<uint32_t>* page_ = process_page();
};

// One T for each process. It is created at first use, and again in a forked child, because another thread of the parent
// may have held the locks of the old one. It is never destroyed, because threads use it while the program ends.
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
  // Calls `body` with the objects of the processes from which this one was forked, until `body` returns true.
  template <class Body>
  bool any_inherited(Body&& body) {
    for (Made* made = made_.load(std::memory_order_acquire); made != nullptr; made = made->before)
      if (!made->birth.here() && body(made->object)) return true;
    return false;
  }

 private:
  struct Made {
    Birth birth;
    Made* before;  // the parent process's object; linked so that leak checkers still see it
    T object;
  };
  std::atomic<Made*> made_{nullptr};
};

}  // namespace moeccl::driver
