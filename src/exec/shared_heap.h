// SPDX-License-Identifier: Apache-2.0
// Memory that processes of the host map and store into, as far as executors must know it: which parts are out of reach.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "src/base/status.h"

namespace moeccl::exec {

// May be used from any thread.
class SharedHeap {
 public:
  // Keeps the peers' stores to this range, and to the pages that it shares with other data, from arriving here any
  // more. From then on the allocation around it counts as ordinary memory. The range ends at the latest where that
  // allocation ends.
  virtual Status detach(void* from, size_t bytes) = 0;
  // Returns whether p lies in an allocation of which a part was detached.
  virtual bool is_detached(const void* p) = 0;
  // Returns the number of detachments.
  uint32_t n_detached() const { return n_detached_.load(std::memory_order_acquire); }
  // See transport::Region.
  const std::atomic<uint64_t>& generation() const { return generation_; }

 protected:
  ~SharedHeap() = default;
  std::atomic<uint32_t> n_detached_{0};
  std::atomic<uint64_t> generation_{0};
};

}  // namespace moeccl::exec
