// SPDX-License-Identifier: Apache-2.0
// Memory that processes of the host map and store into, as far as executors must know: what may no longer be reached.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "src/base/status.h"

namespace moeccl::exec {

// Any thread.
class SharedHeap {
 public:
  // The peers' stores into this range, and into the pages that it shares with others, do not arrive here any more. From
  // now on the allocation around it counts as ordinary memory. At most up to the end of that allocation.
  virtual Status detach(void* from, size_t bytes) = 0;
  // Whether p lies in an allocation of which a part was detached.
  virtual bool is_detached(const void* p) = 0;
  // How often something was.
  uint32_t n_detached() const { return n_detached_.load(std::memory_order_acquire); }
  // See transport::Region.
  const std::atomic<uint64_t>& generation() const { return generation_; }

 protected:
  ~SharedHeap() = default;
  std::atomic<uint32_t> n_detached_{0};
  std::atomic<uint64_t> generation_{0};
};

}  // namespace moeccl::exec
