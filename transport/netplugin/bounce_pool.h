// SPDX-License-Identifier: Apache-2.0
// Memory from which a rank's large puts are sent. They are copied to it, so that a put is done once it is copied, and
// after a failed operation nothing reads memory that is not the library's. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "src/driver/memory.h"
#include "transport/netplugin/wire.h"

namespace moeccl::transport::netplugin {

class BouncePool {
 public:
  BouncePool() = default;
  static Result<BouncePool> create(size_t n_pieces) {
    BouncePool pool;
    MOECCL_ASSIGN_OR_RETURN(pool.memory_, driver::private_memory(n_pieces * kPieceBytes));
    for (size_t i = n_pieces; i-- > 0;) pool.free_.push_back(static_cast<uint32_t>(i));
    return pool;
  }
  std::byte* base() const { return memory_.data(); }
  size_t bytes() const { return memory_.size(); }
  std::byte* piece(uint32_t i) const { return base() + i * kPieceBytes; }
  bool empty() const { return free_.empty(); }
  uint32_t take() {
    const uint32_t i = free_.back();
    free_.pop_back();
    return i;
  }
  void give(uint32_t i) { free_.push_back(i); }

 private:
  driver::Mapping memory_;
  std::vector<uint32_t> free_;  // never grows beyond its first size
};

}  // namespace moeccl::transport::netplugin
