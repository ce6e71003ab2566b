// SPDX-License-Identifier: Apache-2.0
#include "src/world/heap.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "src/base/env.h"
#include "src/driver/fork_page.h"
#include "src/driver/process.h"
#include "src/driver/thread.h"

namespace moeccl::comm {

namespace {

constexpr size_t kLeastBytes = 16u << 20;  // a smaller heap holds no buffer worth sharing

struct HeapOfProcess {
  std::mutex mutex;
  std::atomic<SymmetricHeap*> heap{nullptr};
};
constinit driver::PerProcess<HeapOfProcess> heaps;

}  // namespace

SymmetricHeap::SymmetricHeap(Fd fd, driver::Mapping mapping) : fd_(std::move(fd)), mapping_(std::move(mapping)) {
  free_[0] = mapping_.size();
}

Result<SymmetricHeap*> SymmetricHeap::process_heap() {
  HeapOfProcess& mine = heaps.get();
  const std::lock_guard lock(mine.mutex);
  if (SymmetricHeap* heap = mine.heap; heap != nullptr) return heap;
  const HeapSetting setting{
      .addresses = driver::all_addresses(),
      .left = driver::free_addresses(),
      .processes = static_cast<size_t>(std::max(1, driver::configured_cores())),
      .memory = driver::physical_memory_bytes(),
  };
  const auto given = static_cast<size_t>(env().heap_bytes);
  for (size_t bytes = given > 0 ? given : heap_bytes_for(setting);; bytes /= 2) {
    Result<SymmetricHeap*> made = of_bytes(bytes);
    if (made.ok()) {
      mine.heap = *made;
      return *made;
    }
    if (made.status().code() == moecclOutOfMemory && bytes / 2 >= kLeastBytes && env().heap_bytes == 0) continue;
    return with_remedy(std::move(made).status().with_context("the symmetric heap"));
  }
}

size_t heap_bytes_for(const HeapSetting& s) {
  const size_t all = s.addresses / 2 / s.processes;
  const size_t most = s.left == SIZE_MAX ? all : std::min(all, s.left / std::max<size_t>(16, 2 * s.processes));
  return std::clamp(most / driver::kHugePageBytes * driver::kHugePageBytes, kLeastBytes,
                    std::max(kLeastBytes, s.memory));
}

Result<SymmetricHeap*> SymmetricHeap::of_bytes(size_t bytes) {
  MOECCL_ASSIGN_OR_RETURN(Fd fd, driver::shared_segment("moeccl-heap", bytes));
  MOECCL_ASSIGN_OR_RETURN(driver::Mapping mapping, driver::map_segment(fd, bytes));
  driver::leave_out_of_cores(mapping);
  return new SymmetricHeap(std::move(fd), std::move(mapping));
}

Status SymmetricHeap::with_remedy(Status failure) {
  if (failure.code() != moecclOutOfMemory) return failure;
  const size_t room = driver::free_addresses();
  return error(moecclOutOfMemory, "{}: {}", failure.message(),
               room == SIZE_MAX ? std::string("set MOECCL_HEAP_BYTES, the bytes of each process's heap, lower")
                                : format("this process may map {} bytes more; raise the limit of its addresses (ulimit "
                                         "-v), or set MOECCL_HEAP_BYTES, the bytes of each process's heap, lower",
                                         room));
}

bool SymmetricHeap::inherited(const void* ptr) {
  const auto* p = static_cast<const std::byte*>(ptr);
  return heaps.any_inherited([p](const HeapOfProcess& other) {
    const SymmetricHeap* heap = other.heap.load(std::memory_order_acquire);
    return heap != nullptr && p >= heap->base() && p < heap->base() + heap->bytes();
  });
}

// Returns the offset of the next large buffer within its huge page. Buffers at the same offset of huge pages share
// cache sets and memory banks, and a reduction accesses one buffer of each rank at once (docs/decisions.md).
size_t SymmetricHeap::next_color() {
  constexpr size_t kColors = 16, kStride = 8192 + 256;
  return (static_cast<size_t>(driver::this_process().pid) + 4 * n_large_++) % kColors * kStride;
}

Result<void*> SymmetricHeap::allocate(size_t bytes) {
  if (bytes > mapping_.size()) {
    const bool whole = mapping_.size() >= driver::physical_memory_bytes();
    return error(moecclOutOfMemory, "moecclMemAlloc of {} bytes: the symmetric heap has {} bytes{}", bytes,
                 mapping_.size(),
                 whole ? ", the machine's memory"
                       : ": set MOECCL_HEAP_BYTES higher, or raise the limit of addresses (ulimit -v)");
  }
  const bool large = bytes >= driver::kHugePageBytes;
  std::unique_lock lock(mutex_);
  const size_t unit = large ? driver::kHugePageBytes : driver::page_bytes();
  const size_t color = large ? next_color() : 0;
  const size_t want = (std::max<size_t>(bytes + color, 1) + unit - 1) / unit * unit;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [start, room] = *it;
    const size_t offset = (start + unit - 1) / unit * unit, skipped = offset - start;
    if (room < want + skipped) continue;
    free_.erase(it);
    if (skipped > 0) free_[start] = skipped;
    if (room > want + skipped) free_[offset + want] = room - want - skipped;
    lock.unlock();  // the pages may take long, and other threads' allocations need not wait for them
    const Status reserved = driver::reserve_huge_pages(fd_, mapping_, offset, want);
    if (!reserved.ok()) driver::release_pages(fd_, offset, want);  // it may have got some
    lock.lock();
    if (!reserved.ok()) {
      add_free(offset, want);
      return reserved;
    }
    used_[offset + color] = {offset, want};
    return static_cast<void*>(mapping_.data() + offset + color);
  }
  return error(moecclOutOfMemory, "moecclMemAlloc of {} bytes: no such range is free in the symmetric heap of {} bytes",
               bytes, mapping_.size());
}

Status SymmetricHeap::release(void* ptr) {
  const std::lock_guard lock(mutex_);
  const auto* p = static_cast<std::byte*>(ptr);
  const auto it = p < mapping_.data() ? used_.end() : used_.find(static_cast<size_t>(p - mapping_.data()));
  if (it == used_.end()) {
    return error(moecclInvalidArgument, "moecclMemFree: {} did not come from moecclMemAlloc or was freed already",
                 static_cast<const void*>(ptr));
  }
  const Range range = it->second;
  used_.erase(it);
  driver::release_pages(fd_, range.offset, range.bytes);
  generation_.fetch_add(1, std::memory_order_release);
  size_t at = range.offset;
  for (auto d = detached_.lower_bound(range.offset); d != detached_.end() && d->first < range.end(); ++d) {
    (void)driver::make_inaccessible(mapping_, d->first, d->second);  // on failure the memory stays, unused
    if (at < d->first) add_free(at, d->first - at);
    at = d->first + d->second;
  }
  if (at < range.end()) add_free(at, range.end() - at);
  return {};
}

void SymmetricHeap::add_free(size_t offset, size_t bytes) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

SymmetricHeap::Range SymmetricHeap::allocation_around(size_t offset) const {
  auto it = used_.upper_bound(offset);
  if (it == used_.begin()) return {offset, 0};
  const Range& range = std::prev(it)->second;
  return offset < range.end() ? range : Range{offset, 0};
}

bool SymmetricHeap::any_detached(const Range& range) const {
  const auto it = detached_.lower_bound(range.offset);
  return it != detached_.end() && it->first < range.end();
}

bool SymmetricHeap::is_detached(const void* p) {
  const std::lock_guard lock(mutex_);
  return any_detached(allocation_around(static_cast<size_t>(static_cast<const std::byte*>(p) - mapping_.data())));
}

Status SymmetricHeap::detach(void* from, size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto offset = static_cast<size_t>(static_cast<std::byte*>(from) - mapping_.data());
  const Range around = allocation_around(offset);
  bytes = std::min(bytes, around.end() - std::min(offset, around.end()));
  if (bytes == 0) return {};
  const size_t page = driver::page_bytes();
  const size_t end = (offset + bytes + page - 1) / page * page;
  for (size_t at = offset / page * page; at < end;) {
    // Skip what is detached already.
    auto next = detached_.upper_bound(at);
    if (next != detached_.begin() && std::prev(next)->first + std::prev(next)->second > at) {
      at = std::prev(next)->first + std::prev(next)->second;
      continue;
    }
    const size_t until = next == detached_.end() ? end : std::min(end, next->first);
    MOECCL_TRY(driver::make_private(mapping_, at, until - at));
    detached_[at] = until - at;
    at = until;
  }
  generation_.fetch_add(1, std::memory_order_release);
  // This release pairs with the acquire in n_detached().
  n_detached_.fetch_add(1, std::memory_order_release);
  return {};
}

}  // namespace moeccl::comm
