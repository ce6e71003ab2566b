// SPDX-License-Identifier: Apache-2.0
// Tells the caller's streams of a context apart.
#pragma once

#include <cstdint>

#include "src/base/per_thread.h"
#include "src/driver/cuda.h"

namespace moeccl::exec {

// The handle CU_STREAM_LEGACY, and CU_STREAM_PER_THREAD, which names another stream on each thread.
inline constexpr uintptr_t kLegacyDefault = 1;
inline constexpr uintptr_t kPerThread = 2;
inline bool is_per_thread(driver::cuda::Stream stream) { return reinterpret_cast<uintptr_t>(stream) == kPerThread; }

// The stream that a handle means on the calling thread.
struct StreamName {
  StreamName() = default;
  explicit StreamName(driver::cuda::Stream stream)
      : handle(stream), thread(is_per_thread(stream) ? thread_number() : 0) {}
  bool operator==(const StreamName&) const = default;

  driver::cuda::Stream handle = nullptr;
  uint64_t thread = 0;
};

}  // namespace moeccl::exec
