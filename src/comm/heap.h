// The symmetric heap: memory that every process of the host maps, handed out by moecclMemAlloc. One sealed segment per
// process, as large as the machine's memory in addresses; pages exist only where something is allocated.
#pragma once

#include <map>
#include <mutex>

#include "src/base/fd.h"
#include "src/driver/memory.h"

namespace moeccl::comm {

class SymmetricHeap {
 public:
  // The process's heap, made at first use; it lives until the process ends because peers map it.
  static Result<SymmetricHeap*> process_heap();

  Result<void*> allocate(size_t bytes);
  Status release(void* ptr);
  std::byte* base() const { return mapping_.data(); }
  size_t bytes() const { return mapping_.size(); }
  const Fd& fd() const { return fd_; }

 private:
  size_t next_color();
  SymmetricHeap(Fd fd, driver::Mapping mapping);

  std::mutex mutex_;
  Fd fd_;
  driver::Mapping mapping_;
  std::map<size_t, size_t> free_;  // offset -> bytes, no two adjacent
  struct Range {
    size_t offset, bytes;
  };
  std::map<size_t, Range> used_;  // by the offset that the caller got
  size_t n_large_ = 0;
};

}  // namespace moeccl::comm
