// SPDX-License-Identifier: Apache-2.0
// Memory of a call: the program's, which is the host's or a CUDA device's, and this library's own beside it.
#pragma once

#include <cstring>
#include <initializer_list>
#include <vector>

#include "shim/nccl/device.h"
#include "shim/nccl_ep/structs.h"

namespace moeccl::shim::ep {

// One call's stream and kind of memory. Host memory is used at once, CUDA memory in the order of the stream.
class Place {
 public:
  // The memory is the device's if one of the tensors with elements lies there, or without any if the process uses CUDA.
  Place(const char* function, bool shares_device, cudaStream_t stream, std::initializer_list<const Tensor*> tensors);

  bool on_device() const { return on_device_; }
  cudaStream_t stream() const { return stream_; }
  // What MoECCL gets as stream for calls on this memory.
  moecclStream_t moeccl_stream() const;
  // Waits for the stream's earlier work, so that the host may read its results. Returns InvalidUsage if it is being
  // captured, because a graph cannot hold what the host decides.
  ncclResult_t wait() const;
  // Copy from the program's memory after wait(), and to it.
  ncclResult_t read(void* to, const void* from, size_t bytes) const;
  ncclResult_t put(void* to, const void* from, size_t bytes) const;
  ncclResult_t copy(void* to, const void* from, size_t bytes) const;
  ncclResult_t fill(void* to, unsigned char value, size_t bytes) const;
  // Writes integers of the tensor's own type.
  ncclResult_t put_counts(const Tensor& to, const std::vector<int64_t>& counts) const;

 private:
  ncclResult_t done(bool ok, const char* what) const;
  const char* function_;
  bool shares_device_, on_device_ = false;
  cudaStream_t stream_;
};

// Memory that grows as calls need it, of the kind that the last one needed. It is freed after the work that uses it;
// what a captured call uses stays until the object ends, because the graph may run at any time.
class Scratch {
 public:
  explicit Scratch(const ncclEpAllocConfig_t& alloc) : alloc_(alloc) {}
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  // Returns at least one byte in *out. If it has to grow, what was there is lost, after the stream's earlier work; on a
  // stream that is being captured that is InvalidUsage, because the graph would own the new memory. What earlier graphs
  // hold is not given back, and later calls use other memory.
  ncclResult_t take(const char* function, const Place& at, size_t bytes, void** out);
  // To be called when the work that uses it is on the stream.
  void used(const Place& at) {
    if (on_device_ && data_ != nullptr) last_use_.record(at.stream());
  }

 private:
  void release(cudaStream_t stream);
  void give_back(void* device_memory, cudaStream_t stream);
  const ncclEpAllocConfig_t& alloc_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
  bool on_device_ = false, captured_ = false;  // a graph holds data_
  std::vector<void*> of_graphs_;               // device memory that was data_ when a call was captured
  device::Event last_use_;
};

}  // namespace moeccl::shim::ep
