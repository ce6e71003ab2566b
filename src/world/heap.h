// SPDX-License-Identifier: Apache-2.0
// The symmetric heap: memory that every process of the host maps, handed out by moecclMemAlloc. One sealed segment per
// process, as large as the machine's memory in addresses (less under a limit of addresses, or as MOECCL_HEAP_BYTES
// says); pages exist only where something is allocated.
#pragma once

#include <map>
#include <mutex>

#include "src/base/fd.h"
#include "src/driver/memory.h"
#include "src/exec/shared_heap.h"

namespace moeccl::comm {

class SymmetricHeap final : public exec::SharedHeap {
 public:
  // The process's heap, made at first use; it lives until the process ends because peers map it. A forked child has one
  // of its own: the parent's pages are still the parent's.
  static Result<SymmetricHeap*> process_heap();
  // Whether ptr lies in the heap of a process that this one was forked from.
  static bool inherited(const void* ptr);

  // What to do about a heap, own or a peer's, for which there were no addresses.
  static Status with_remedy(Status failure);

  Result<void*> allocate(size_t bytes);
  Status release(void* ptr);
  Status detach(void* from, size_t bytes) override;
  bool is_detached(const void* p) override;
  std::byte* base() const { return mapping_.data(); }
  size_t bytes() const { return mapping_.size(); }
  const Fd& fd() const { return fd_; }

 private:
  struct Range {
    size_t offset, bytes;
    size_t end() const { return offset + bytes; }
  };
  static size_t wanted_bytes();
  static Result<SymmetricHeap*> of_bytes(size_t bytes);
  size_t next_color();
  Range allocation_around(size_t offset) const;  // of 0 bytes: nothing is allocated there
  bool any_detached(const Range& range) const;
  void add_free(size_t offset, size_t bytes);
  SymmetricHeap(Fd fd, driver::Mapping mapping);

  std::mutex mutex_;
  Fd fd_;
  driver::Mapping mapping_;
  std::map<size_t, size_t> free_;  // offset -> bytes, no two adjacent
  std::map<size_t, Range> used_;   // by the offset that the caller got
  // Pages that are this process's own, offset -> bytes, no two overlap. They are never handed out again: a peer that
  // was stopped while it stored into them may go on at any time.
  std::map<size_t, size_t> detached_;
  size_t n_large_ = 0;
};

}  // namespace moeccl::comm
