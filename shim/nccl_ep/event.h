// SPDX-License-Identifier: Apache-2.0
// A CUDA event, beside what the NCCL shim's device.h knows of CUDA.
#pragma once

#include "shim/nccl_ep/abi.h"

namespace moeccl::shim::ep {

// A mark in the work of streams. It needs neither the streams that it was recorded on nor a current device later.
class Event {
 public:
  Event() = default;
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  // Marks the work that is on the stream now, in the current device. A stream that is being captured, or is none of
  // CUDA's, leaves the mark where it was.
  void record(cudaStream_t stream);
  // Waits for the marked work.
  void wait() const;

 private:
  void* event_ = nullptr;
};

}  // namespace moeccl::shim::ep
