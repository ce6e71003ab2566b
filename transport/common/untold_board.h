// SPDX-License-Identifier: Apache-2.0
// Whether this rank's board holds something that an engine has not told its peers yet.
#pragma once

#include <atomic>

namespace moeccl::transport {

// Any thread; sequentially consistent, because a thread that is about to sleep looks here after it has said so.
class UntoldBoard {
 public:
  void set() { any_.store(true); }
  bool any() const { return any_.load(); }
  // Called before the board is read: what is read includes what was written before a set() that this overwrites.
  void take() { (void)any_.exchange(false); }

 private:
  std::atomic<bool> any_{false};
};

}  // namespace moeccl::transport
