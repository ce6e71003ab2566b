// SPDX-License-Identifier: Apache-2.0
// Memory that the NICs of a rank may read from. A region pins pages, and keeps referring to those pages after the
// program has unmapped them and others lie at their addresses. A library cannot see that without hooking the program's
// allocator, so only memory whose end is reported to MoECCL is kept registered: its own, the symmetric heap's, whose
// generation changes when pages of it go away, and what the program registers (moecclCommRegister .. Deregister). All
// other memory is copied: registering it for one put would pin and unpin its pages each time, which takes longer than
// copying what an operation puts at once (docs/verbs.md).
//
// Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "transport/transport.h"
#include "transport/verbs/rail.h"

namespace moeccl::transport::verbs {

// A registration on every rail of the rank, in their order.
class Region {
 public:
  // access: flags of ibv_abi. Relaxed ordering is left out where the library does not know it. dmabuf: the memory is
  // this file's, from its beginning; -1: it is mapped here, or a kernel module knows it.
  static Result<std::unique_ptr<Region>> make(std::span<const std::unique_ptr<Rail>> rails, std::byte* base,
                                              size_t bytes, unsigned access, int dmabuf = -1);
  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  bool holds(const void* p, size_t bytes) const {
    const auto* at = static_cast<const std::byte*>(p);
    return at >= base_ && at < base_ + bytes_ && bytes <= static_cast<size_t>(base_ + bytes_ - at);
  }
  uint32_t lkey(size_t rail) const { return parts_[rail]->lkey; }
  uint32_t rkey(size_t rail) const { return parts_[rail]->rkey; }

 private:
  friend class Regions;
  Region(std::span<const std::unique_ptr<Rail>> rails, std::byte* base, size_t bytes)
      : rails_(rails), base_(base), bytes_(bytes) {}

  std::span<const std::unique_ptr<Rail>> rails_;
  std::byte* base_;
  size_t bytes_;
  std::vector<driver::ibv_abi::MemoryRegion*> parts_;
  uint32_t users_ = 0;    // requests under way; for Regions
  bool retired_ = false;  // taken back while it was in use
};

class Regions {
 public:
  static constexpr size_t kGranule = size_t{2} << 20;  // the unit in which a heap is registered

  explicit Regions(std::span<const std::unique_ptr<Rail>> rails) : rails_(rails) {}

  // Adds memory with holes, which is registered by granules where a put reads from it.
  void add_heap(const transport::Region& heap) { heaps_.push_back({heap, 0, {}}); }
  // The memory must stay where it is until take_back() of the same range. Ranges may overlap.
  void lend(std::byte* base, size_t bytes);
  void take_back(std::byte* base, size_t bytes);

  struct Use {
    Region* region = nullptr;  // null: the memory must be copied
    size_t bytes = 0;          // leading bytes of the range that are in it
  };
  // Returns a region that holds the beginning of the range, and counts it as used until release(). Memory that cannot
  // be registered is reported once in the log, and copied.
  Use use(const void* p, size_t bytes);
  void release(Region* region);
  // Ends the registration of heap pages that went away. use() does so too.
  void look_at_heaps();

  size_t registered() const;    // regions that are there
  size_t pinned_bytes() const;  // on each rail

 private:
  struct Loan {
    std::byte* base;
    size_t bytes;  // whole pages
    uint32_t times = 1;
    bool refused = false;
    std::unique_ptr<Region> region;  // null before the first use
  };
  struct Heap {
    transport::Region memory;
    uint64_t generation = 0;                                       // when granules were last valid
    std::unordered_map<size_t, std::unique_ptr<Region>> granules;  // by number; null: refused
  };
  void retire(std::unique_ptr<Region> region);
  void refresh(Heap& heap);
  std::unique_ptr<Region> make(std::byte* base, size_t bytes);
  Region* loan_of(const std::byte* at, size_t bytes);

  std::span<const std::unique_ptr<Rail>> rails_;
  mutable std::mutex mutex_;
  std::vector<Loan> loans_;  // by base, then bytes
  size_t longest_ = 0;       // of the longest: how far before an address a loan may begin
  std::vector<Heap> heaps_;
  std::vector<std::unique_ptr<Region>> retired_;  // still in use when their memory went away
  bool told_ = false;
};

}  // namespace moeccl::transport::verbs
