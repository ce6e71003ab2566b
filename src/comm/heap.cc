#include "src/comm/heap.h"

#include <utility>

namespace moeccl::comm {

SymmetricHeap::SymmetricHeap(Fd fd, driver::Mapping mapping) : fd_(std::move(fd)), mapping_(std::move(mapping)) {
  free_[0] = mapping_.size();
}

Result<SymmetricHeap*> SymmetricHeap::process_heap() {
  static std::mutex mutex;
  static SymmetricHeap* heap = nullptr;  // never freed: see the class comment
  const std::lock_guard lock(mutex);
  if (heap != nullptr) return heap;
  const size_t bytes = driver::physical_memory_bytes();
  MOECCL_ASSIGN_OR_RETURN(Fd fd, driver::shared_segment("moeccl-heap", bytes, false));
  MOECCL_ASSIGN_OR_RETURN(driver::Mapping mapping, driver::map_segment(fd, bytes));
  heap = new SymmetricHeap(std::move(fd), std::move(mapping));
  return heap;
}

Result<void*> SymmetricHeap::allocate(size_t bytes) {
  const size_t page = driver::page_bytes();
  if (bytes > mapping_.size()) {
    return error(moecclOutOfMemory, "moecclMemAlloc of {} bytes: the symmetric heap has {} bytes, the machine's memory",
                 bytes, mapping_.size());
  }
  const size_t want = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
  const std::lock_guard lock(mutex_);
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, room] = *it;
    if (room < want) continue;
    MOECCL_TRY(driver::reserve_pages(fd_, offset, want));
    free_.erase(it);
    if (room > want) free_[offset + want] = room - want;
    used_[offset] = want;
    return static_cast<void*>(mapping_.data() + offset);
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
  size_t offset = it->first, bytes = it->second;
  used_.erase(it);
  driver::release_pages(fd_, offset, bytes);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return {};
    }
  }
  free_[offset] = bytes;
  return {};
}

}  // namespace moeccl::comm
