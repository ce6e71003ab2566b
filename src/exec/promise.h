// SPDX-License-Identifier: Apache-2.0
// A place in the order of the persistent kernel's launches for an operation that a host thread will launch. Others must
// not overtake it. The place is kept as long as the object exists.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace moeccl::exec {

struct BreakPromise {
  void operator()(std::atomic<uint32_t>* promised) const { promised->fetch_sub(1, std::memory_order_release); }
};
using Promise = std::unique_ptr<std::atomic<uint32_t>, BreakPromise>;

}  // namespace moeccl::exec
