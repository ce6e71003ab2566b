// SPDX-License-Identifier: Apache-2.0
// Memory for operations, from moecclMemAlloc, malloc or a GPU. A GPU's memory has a copy on the host that is filled and
// checked.
#ifndef PERF_COMMON_BUFFER_H_
#define PERF_COMMON_BUFFER_H_

#include <moeccl/comm.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/gpu.h"
#include "perf/common/job.h"

namespace perf {

class Buffer {
 public:
  Buffer() = default;
  Buffer(size_t bytes, Memory memory) : bytes_(bytes), memory_(memory) {
    if (memory == Memory::kCuda) {  // on the thread's current device
      data_ = gpu::allocate(bytes);
      gpu::clear(data_, bytes);
      return;
    }
    if (memory == Memory::kHeap) {
      check(moecclMemAlloc(&data_, bytes), "moecclMemAlloc");
    } else if ((data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64)) == nullptr) {
      fail("no memory for a buffer of " + std::to_string(bytes) + " bytes");
    }
    std::memset(data_, 0, bytes);  // touch every page: reads of the shared zero page would be too fast
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
    std::swap(shadow_, other.shadow_);
    return *this;
  }
  ~Buffer() {
    std::free(shadow_);
    if (data_ == nullptr) return;
    if (memory_ == Memory::kCuda)
      gpu::release(data_);
    else if (memory_ == Memory::kHeap)
      (void)moecclMemFree(data_);
    else
      std::free(data_);
  }

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

  // Returns the host address that stands for `at`: `at` itself or, for a GPU's memory, its place in the host copy.
  // Write it before push() and read it after pull(), which copy `n` bytes to and from the GPU.
  char* host(const char* at) {
    if (memory_ != Memory::kCuda) return const_cast<char*>(at);
    if (shadow_ == nullptr && (shadow_ = static_cast<char*>(std::calloc(1, bytes_))) == nullptr)
      fail("no memory for the copy of a buffer of " + std::to_string(bytes_) + " bytes");
    return shadow_ + (at - data());
  }
  void push(char* at, size_t n) {
    if (memory_ == Memory::kCuda) gpu::upload(at, host(at), n);
  }
  void pull(const char* at, size_t n) {
    if (memory_ == Memory::kCuda) gpu::download(host(at), at, n);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Memory memory_ = Memory::kMalloc;
  char* shadow_ = nullptr;
};

}  // namespace perf

#endif  // PERF_COMMON_BUFFER_H_
