// Memory for operations: from moecclMemAlloc or malloc.
#ifndef PERF_COMMON_BUFFER_H_
#define PERF_COMMON_BUFFER_H_

#include <moeccl/comm.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "perf/common/fail.h"
#include "perf/common/job.h"

namespace perf {

class Buffer {
 public:
  Buffer() = default;
  Buffer(size_t bytes, Memory memory) : bytes_(bytes), memory_(memory) {
    if (memory == Memory::kHeap) {
      check(moecclMemAlloc(&data_, bytes), "moecclMemAlloc");
    } else if ((data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64)) == nullptr) {
      fail("no memory for a buffer of " + std::to_string(bytes) + " bytes");
    }
    std::memset(data_, 0, bytes);  // pages of its own: reading the shared zero page would be too good
  }
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(memory_, other.memory_);
    return *this;
  }
  ~Buffer() {
    if (data_ == nullptr) return;
    if (memory_ == Memory::kHeap)
      (void)moecclMemFree(data_);
    else
      std::free(data_);
  }

  char* data() const { return static_cast<char*>(data_); }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Memory memory_ = Memory::kMalloc;
};

}  // namespace perf

#endif  // PERF_COMMON_BUFFER_H_
