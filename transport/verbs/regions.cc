// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/regions.h"

#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "src/base/log.h"
#include "src/driver/memory.h"

namespace moeccl::transport::verbs {

using namespace driver::ibv_abi;

namespace {

std::string locked_limit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return format("{} KiB", limit.rlim_cur >> 10);
}

Status refused(const Rail& rail, size_t bytes, int code) {
  if (code == ENOMEM || code == EAGAIN) {
    return error(moecclOutOfMemory,
                 "a region of {} bytes is not registered on {}: {}; raise the locked-memory limit (ulimit -l, now {})",
                 bytes, rail.info().name(), std::strerror(code), locked_limit());
  }
  return error(moecclSystemError, "a region of {} bytes is not registered on {}: {}", bytes, rail.info().name(),
               std::strerror(code));
}

}  // namespace

Result<std::unique_ptr<Region>> Region::make(std::span<const std::unique_ptr<Rail>> rails, std::byte* base,
                                             size_t bytes, unsigned access, int dmabuf) {
  std::unique_ptr<Region> region(new Region(rails, base, bytes));
  for (const auto& rail : rails) {
    const driver::IbvApi& api = rail->api();
    MemoryRegion* part = nullptr;
    const auto address = reinterpret_cast<uint64_t>(base);
    if (dmabuf >= 0) {
      part = api.reg_dmabuf_mr(rail->pd(), 0, bytes, address, dmabuf, static_cast<int>(access));
    } else if ((access & kRelaxedOrdering) != 0 && api.reg_mr_iova2 != nullptr) {
      part = api.reg_mr_iova2(rail->pd(), base, bytes, address, access);
    }
    if (part == nullptr && dmabuf < 0)
      part = api.reg_mr(rail->pd(), base, bytes, static_cast<int>(access & ~kRelaxedOrdering));
    if (part == nullptr) return refused(*rail, bytes, errno);
    region->parts_.push_back(part);
  }
  return region;
}

Region::~Region() {
  for (size_t i = 0; i < parts_.size(); ++i) (void)rails_[i]->api().dereg_mr(parts_[i]);
}

void Regions::lend(std::byte* base, size_t bytes) {
  if (bytes == 0) return;
  const size_t page = driver::page_bytes();
  const auto begin = reinterpret_cast<uintptr_t>(base) / page * page;
  const size_t length = (reinterpret_cast<uintptr_t>(base) + bytes + page - 1) / page * page - begin;
  auto* const first = reinterpret_cast<std::byte*>(begin);
  const std::lock_guard lock(mutex_);
  const auto at = std::lower_bound(loans_.begin(), loans_.end(), std::pair(first, length),
                                   [](const Loan& l, auto key) { return std::pair(l.base, l.bytes) < key; });
  if (at != loans_.end() && at->base == first && at->bytes == length) {
    ++at->times;
    return;
  }
  loans_.insert(at, Loan{first, length, 1, false, nullptr});
  longest_ = std::max(longest_, length);
}

void Regions::take_back(std::byte* base, size_t bytes) {
  if (bytes == 0) return;
  const size_t page = driver::page_bytes();
  auto* const first = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(base) / page * page);
  auto* const end = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(base) + bytes + page - 1) / page * page);
  const std::lock_guard lock(mutex_);
  for (auto l = loans_.begin(); l != loans_.end(); ++l) {
    if (l->base != first || l->base + l->bytes != end) continue;
    if (--l->times > 0) return;
    retire(std::move(l->region));
    loans_.erase(l);
    return;
  }
}

void Regions::retire(std::unique_ptr<Region> region) {
  if (region == nullptr || region->users_ == 0) return;
  region->retired_ = true;
  retired_.push_back(std::move(region));
}

std::unique_ptr<Region> Regions::make(std::byte* base, size_t bytes) {
  Result<std::unique_ptr<Region>> made = Region::make(rails_, base, bytes, 0);
  if (made.ok()) return std::move(*made);
  if (!std::exchange(told_, true)) log(LogLevel::kWarn, "{}; such memory is copied", made.status().message());
  return nullptr;
}

Region* Regions::loan_of(const std::byte* at, size_t bytes) {
  auto l = std::upper_bound(loans_.begin(), loans_.end(), at,
                            [](const std::byte* x, const Loan& loan) { return x < loan.base; });
  while (l != loans_.begin()) {
    --l;
    if (l->base + longest_ <= at) return nullptr;
    if (at + bytes > l->base + l->bytes || l->refused) continue;
    if (l->region == nullptr) l->region = make(l->base, l->bytes);
    l->refused = l->region == nullptr;
    if (!l->refused) return l->region.get();
  }
  return nullptr;
}

void Regions::refresh(Heap& heap) {
  // Acquire: pairs with the release of the code that takes pages away.
  const uint64_t now = heap.memory.generation == nullptr ? 0 : heap.memory.generation->load(std::memory_order_acquire);
  if (now == heap.generation) return;
  for (auto& [number, region] : heap.granules) retire(std::move(region));
  heap.granules.clear();
  heap.generation = now;
}

void Regions::look_at_heaps() {
  const std::lock_guard lock(mutex_);
  for (Heap& heap : heaps_) refresh(heap);
}

Regions::Use Regions::use(const void* p, size_t bytes) {
  const auto* const at = static_cast<const std::byte*>(p);
  const std::lock_guard lock(mutex_);
  if (Region* const region = loan_of(at, bytes); region != nullptr) {
    ++region->users_;
    return {region, bytes};
  }
  for (Heap& heap : heaps_) {
    if (at < heap.memory.base || at >= heap.memory.base + heap.memory.bytes) continue;
    refresh(heap);
    const auto offset = static_cast<size_t>(at - heap.memory.base);
    const size_t number = offset / kGranule, begin = number * kGranule;
    auto found = heap.granules.find(number);
    if (found == heap.granules.end()) {
      const size_t length = std::min(kGranule, heap.memory.bytes - begin);
      found = heap.granules.emplace(number, make(heap.memory.base + begin, length)).first;
    }
    Region* const region = found->second.get();
    if (region == nullptr) return {};
    ++region->users_;
    return {region, std::min(bytes, begin + region->bytes() - offset)};
  }
  return {};
}

void Regions::release(Region* region) {
  const std::lock_guard lock(mutex_);
  if (--region->users_ > 0 || !region->retired_) return;
  std::erase_if(retired_, [region](const auto& r) { return r.get() == region; });
}

size_t Regions::registered() const {
  const std::lock_guard lock(mutex_);
  size_t n = retired_.size();
  for (const Loan& l : loans_) n += l.region != nullptr ? 1 : 0;
  for (const Heap& heap : heaps_)
    for (const auto& [number, region] : heap.granules) n += region != nullptr ? 1 : 0;
  return n;
}

size_t Regions::pinned_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (const Loan& l : loans_) bytes += l.region != nullptr ? l.bytes : 0;
  for (const Heap& heap : heaps_)
    for (const auto& [number, region] : heap.granules) bytes += region != nullptr ? region->bytes() : 0;
  for (const auto& r : retired_) bytes += r->bytes();
  return bytes;
}

}  // namespace moeccl::transport::verbs
