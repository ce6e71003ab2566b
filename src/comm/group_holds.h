// SPDX-License-Identifier: Apache-2.0
// Counts the calls of open groups that use an object, which must not be destroyed before they were issued or dropped.
#pragma once

#include <atomic>
#include <cstdint>

namespace moeccl::comm {

class GroupHolds {
 public:
  void add() { n_.fetch_add(1, std::memory_order_relaxed); }
  void remove() { n_.fetch_sub(1, std::memory_order_release); }
  // Acquire: pairs with remove(); with 0, the calls no longer use the object.
  uint32_t count() const { return n_.load(std::memory_order_acquire); }

 private:
  std::atomic<uint32_t> n_{0};
};

}  // namespace moeccl::comm
