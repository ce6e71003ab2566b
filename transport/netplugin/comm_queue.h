// SPDX-License-Identifier: Apache-2.0
// The transfers of one comm of a plugin. They are added in order, posted as far as the plugin takes them, and reported
// when they are done, oldest first. One thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "transport/netplugin/net_api.h"

namespace moeccl::transport::netplugin {

class CommQueue {
 public:
  struct Transfer {
    void* data = nullptr;
    size_t bytes = 0;
    Memory memory = nullptr;
    uint32_t tag = 0;  // for the owner
    bool flush = false;
  };
  enum class Way : uint8_t { kSends, kReceives };
  static constexpr uint32_t kCapacity = 64;
  // The most transfers under way at once; v6 allows no more.
  static constexpr uint32_t kDepth = 8;

  CommQueue(NetApi& api, Comm comm, Way way) : api_(&api), comm_(comm), way_(way) {}

  Comm comm() const { return comm_; }
  uint32_t size() const { return n_; }
  bool full() const { return n_ == kCapacity; }
  void add(const Transfer& t) {
    entries_[(first_ + n_) % kCapacity] = {t, nullptr};
    ++n_;
  }
  // Posts what the plugin would not take before.
  Status post();
  // Returns whether the oldest is done. If so, it is in *t, and *bytes says how many bytes came, or 0 if the plugin
  // does not.
  Result<bool> take_done(Transfer* t, size_t* bytes);
  // Empties the queue of a comm that is closed: gives the tag of each transfer to its owner.
  template <typename Give>
  void drop(const Give& give) {
    for (; n_ > 0; --n_, first_ = (first_ + 1) % kCapacity) give(entries_[first_].is.tag);
    posted_ = 0;
  }

 private:
  struct Posted {
    Transfer is;
    Request request = nullptr;
  };
  NetApi* api_;
  Comm comm_;
  Way way_;
  uint32_t first_ = 0, n_ = 0, posted_ = 0;
  std::array<Posted, kCapacity> entries_ = {};
};

}  // namespace moeccl::transport::netplugin
