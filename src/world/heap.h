// SPDX-License-Identifier: Apache-2.0
// The symmetric heap: memory that every process of the host maps and that moecclMemAlloc hands out. Each process has
// one sealed segment with as many addresses as the machine has memory (fewer under an address-space limit, or as many
// as MOECCL_HEAP_BYTES says). Pages exist only where something is allocated.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "src/base/fd.h"
#include "src/driver/memory.h"
#include "src/exec/shared_heap.h"

namespace moeccl::comm {

// What the size of a heap depends on.
struct HeapSetting {
  size_t addresses = 0;    // of any process on this machine
  size_t left = SIZE_MAX;  // under this process's limit of addresses; SIZE_MAX: there is none
  size_t processes = 1;    // of the host, each of which maps the heaps of all of them: one for each core
  size_t memory = 0;       // of the machine
};
// Returns as many bytes as the machine has memory, as far as the heaps of all processes fit into half of the addresses.
// If addresses are limited, returns a share of a part of what is left.
size_t heap_bytes_for(const HeapSetting& setting);

class SymmetricHeap final : public exec::SharedHeap {
 public:
  // Returns the process's heap, which is created at first use. It lives until the process ends, because peers map it. A
  // forked child has its own heap, because the parent's pages still belong to the parent.
  static Result<SymmetricHeap*> process_heap();
  // Returns true if ptr lies in the heap of a process from which this one was forked.
  static bool inherited(const void* ptr);

  // Adds the remedy to a failure to find addresses for a heap, this process's or a peer's.
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
  static Result<SymmetricHeap*> of_bytes(size_t bytes);
  size_t next_color();
  Range allocation_around(size_t offset) const;  // of 0 bytes if nothing is allocated there
  bool any_detached(const Range& range) const;
  void add_free(size_t offset, size_t bytes);
  SymmetricHeap(Fd fd, driver::Mapping mapping);

  std::mutex mutex_;
  Fd fd_;
  driver::Mapping mapping_;
  std::map<size_t, size_t> free_;  // offset -> bytes, never adjacent
  std::map<size_t, Range> used_;   // by the offset that the caller received
  // Pages that are private to this process, offset -> bytes, never overlapping. They are never handed out again,
  // because a peer that was stopped while it stored into them may continue at any time.
  std::map<size_t, size_t> detached_;
  size_t n_large_ = 0;
};

}  // namespace moeccl::comm
