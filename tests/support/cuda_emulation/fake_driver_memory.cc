// SPDX-License-Identifier: Apache-2.0
// The emulated driver's memory: device memory, page-locked memory, attributes of an address, and copies.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "tests/support/cuda_emulation/stream.h"

namespace moeccl::emulation::driver {

Machine& machine() {
  static auto* m = new Machine;
  return *m;
}

size_t pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

int map_device(int fd, size_t bytes, uint64_t* out, const Allocation& as) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return kOutOfMemory;
  const std::lock_guard lock(machine().mutex);
  protect(reinterpret_cast<uint64_t>(p), machine().device[reinterpret_cast<uint64_t>(p)] = as);
  return *out = reinterpret_cast<uint64_t>(p), kOk;
}

int allocate_device(size_t bytes, uint64_t* out, Allocation as) {
  if (bytes > (size_t{1} << 36)) return kOutOfMemory;
  as.bytes = pages(bytes);
  as.fd = memfd_create("emulated-device-memory", MFD_CLOEXEC);
  if (as.fd < 0) return kOutOfMemory;
  if (ftruncate(as.fd, static_cast<off_t>(as.bytes)) == 0) {
    spoil(as.fd, as.bytes);
    return map_device(as.fd, as.bytes, out, as);
  }
  close(as.fd);
  return kOutOfMemory;
}

const Allocation* find_device(uint64_t p, uint64_t* base) {
  auto it = machine().device.upper_bound(p);
  if (it == machine().device.begin()) return nullptr;
  --it;
  if (p >= it->first + it->second.bytes) return nullptr;
  if (base != nullptr) *base = it->first;
  return &it->second;
}

bool is_pinned(uint64_t p, uint64_t* base, size_t* bytes) {
  auto it = machine().pinned.upper_bound(p);
  if (it == machine().pinned.begin()) return false;
  --it;
  if (p >= it->first + it->second.bytes) return false;
  if (base != nullptr) *base = it->first;
  if (bytes != nullptr) *bytes = it->second.bytes;
  return true;
}

void free_all(const Context& context) {
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  std::erase_if(m.device, [&](const auto& d) {
    const Allocation& a = d.second;
    if (a.device != context.device || a.mapped || a.opened > 0) return false;
    munmap(reinterpret_cast<void*>(d.first), a.bytes);
    close(a.fd);
    return true;
  });
  std::erase_if(m.pinned, [&](const auto& p) {
    if (p.second.device != context.device) return false;
    if (p.second.allocated) munmap(reinterpret_cast<void*>(p.first), p.second.bytes);
    return true;
  });
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

EXPORT int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  if (bytes == 0) return kInvalidValue;
  Allocation a;
  a.device = context->device;
  {
    const std::lock_guard lock(machine().mutex);
    a.access = 1u << context->device | machine().peers[context->device];
  }
  return allocate_device(bytes, out, a);
}
EXPORT int cuMemFree_v2(uint64_t p) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  synchronizes_alone(*context);
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().device.find(p);
  if (it == machine().device.end() || it->second.opened > 0 || it->second.mapped) return kInvalidValue;
  munmap(reinterpret_cast<void*>(p), it->second.bytes);
  // A process that has opened it by its handle may not use it any more either.
  if (it->second.given_out) (void)!ftruncate(it->second.fd, 0);
  close(it->second.fd);
  machine().device.erase(it);
  return kOk;
}
EXPORT int cuMemHostAlloc(void** p, size_t bytes, unsigned flags) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  if (bytes == 0 || flags > 7) return kInvalidValue;
  synchronizes(*context);
  void* const made = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return kOutOfMemory;
  spoil(made, bytes);
  const std::lock_guard lock(machine().mutex);
  machine().pinned[reinterpret_cast<uint64_t>(made)] = {pages(bytes), context->device, true};
  return *p = made, kOk;
}
EXPORT int cuMemFreeHost(void* p) {
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  synchronizes_alone(*context);
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().pinned.find(reinterpret_cast<uint64_t>(p));
  if (it == machine().pinned.end() || !it->second.allocated) return kInvalidValue;
  munmap(p, it->second.bytes);
  machine().pinned.erase(it);
  return kOk;
}
namespace {
bool overlaps_pinned(uint64_t p, size_t bytes) {
  const auto next = machine().pinned.lower_bound(p);
  return is_pinned(p) || (next != machine().pinned.end() && next->first < p + bytes);
}
bool is_mapped(uint64_t p, size_t bytes) {
  const uint64_t first = p / 4096 * 4096;
  std::vector<unsigned char> resident(pages(p + bytes - first) / 4096);
  return mincore(reinterpret_cast<void*>(first), p + bytes - first, resident.data()) == 0;
}
}  // namespace
EXPORT int cuMemHostRegister_v2(void* p, size_t bytes, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  const auto first = reinterpret_cast<uint64_t>(p);
  if (p == nullptr || bytes == 0 || flags > 15 || !is_mapped(first, bytes)) return kInvalidValue;
  synchronizes(*context);
  const std::lock_guard lock(machine().mutex);
  if (overlaps_pinned(first, bytes)) return kAlreadyRegistered;
  machine().pinned[first] = {bytes, context->device, false};
  return kOk;
}
EXPORT int cuMemHostUnregister(void* p) {
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  synchronizes_alone(*context);
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().pinned.find(reinterpret_cast<uint64_t>(p));
  if (it == machine().pinned.end() || it->second.allocated) return kNotRegistered;
  machine().pinned.erase(it);
  return kOk;
}
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* out, void* p, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  if (flags != 0) return kInvalidValue;
  const std::lock_guard lock(machine().mutex);
  if (!is_pinned(reinterpret_cast<uint64_t>(p))) return kInvalidValue;
  return *out = reinterpret_cast<uint64_t>(p), kOk;
}
EXPORT int cuMemGetInfo_v2(size_t* free, size_t* total) {
  MOECCL_IN_CONTEXT(context);
  constexpr size_t kTotal = size_t{80} << 30;
  size_t used = 0;
  const std::lock_guard lock(machine().mutex);
  for (const auto& [base, a] : machine().device) used += a.device == context->device && a.opened == 0 ? a.bytes : 0;
  return *total = kTotal, *free = kTotal - used, kOk;
}
EXPORT int cuMemGetAddressRange_v2(uint64_t* base, size_t* bytes, uint64_t p) {
  MOECCL_IN_CONTEXT(context);
  uint64_t at = 0;
  const std::lock_guard lock(machine().mutex);
  const Allocation* const a = find_device(p, &at);
  if (a == nullptr) return kNotFound;
  if (base != nullptr) *base = at;
  if (bytes != nullptr) *bytes = a->bytes;
  return kOk;
}

// Attributes of an address. As in the real driver, these calls need no current context.
namespace {

enum Attribute : int {
  kContext = 1,
  kMemoryType = 2,
  kDevicePointer = 3,
  kHostPointer = 4,
  kSyncMemops = 6,
  kBufferId = 7,
  kIsManaged = 8,
  kDeviceOrdinal = 9,
  kIpcCapable = 10,
  kRangeStart = 11,
  kRangeBytes = 12,
  kIsMapped = 13,
  kHandleTypes = 14,
  kGpuDirect = 15,
  kAccessFlags = 16,
  kPool = 17,
  kMappingBytes = 18,
  kMappingBase = 19
};

template <class T>
int give(void* out, T value) {
  std::memcpy(out, &value, sizeof(value));
  return kOk;
}

int attribute_of(void* out, int attribute, uint64_t p) {
  uint64_t base = 0;
  size_t bytes = 0;
  const Allocation* const a = find_device(p, &base);
  if (a == nullptr && !is_pinned(p, &base, &bytes)) return kInvalidValue;
  // Memory that a context owns and that legacy IPC handles work for.
  const bool plain = a != nullptr && !a->mapped && a->pool == nullptr;
  switch (attribute) {
    case kContext:
      return give(out, plain ? context_of_device(a->device) : nullptr);
    case kMemoryType:
      return give(out, a != nullptr ? 2u : 1u);
    case kDevicePointer:
      return give(out, p);
    case kHostPointer:
      return a != nullptr ? kInvalidValue : give(out, p);
    case kBufferId:
      return give(out, base);
    case kSyncMemops:
    case kIsManaged:
      return give(out, 0u);
    case kDeviceOrdinal:
      return give(out, a != nullptr ? a->device : 0);
    case kIpcCapable:
      return give(out, static_cast<unsigned>(plain && a->opened == 0));
    case kRangeStart:
    case kMappingBase:
      return give(out, base);
    case kRangeBytes:
    case kMappingBytes:
      return give(out, a != nullptr ? a->bytes : bytes);
    case kIsMapped:
    case kGpuDirect:
      return give(out, 1u);
    case kHandleTypes:
      return give(out, uint64_t{a != nullptr && a->mapped ? 1u : 0u});
    case kAccessFlags:
      return give(out, 3u);
    case kPool:
      return give(out, a != nullptr ? a->pool : nullptr);
    default:
      return kInvalidValue;
  }
}

}  // namespace

EXPORT int cuPointerGetAttribute(void* out, int attribute, uint64_t p) {
  MOECCL_CALL();
  const std::lock_guard lock(machine().mutex);
  return attribute_of(out, attribute, p);
}
// Unlike cuPointerGetAttribute, this function returns zeros for memory that CUDA does not know.
EXPORT int cuPointerGetAttributes(unsigned n, int* attributes, void** out, uint64_t p) {
  MOECCL_CALL();
  const std::lock_guard lock(machine().mutex);
  const bool known = find_device(p) != nullptr || is_pinned(p);
  for (unsigned i = 0; i < n; ++i) {
    switch (attributes[i]) {
      case kContext:
      case kDevicePointer:
      case kHostPointer:
      case kBufferId:
      case kRangeStart:
      case kRangeBytes:
      case kMappingBase:
      case kMappingBytes:
      case kHandleTypes:
      case kPool:
        (void)give(out[i], uint64_t{0});
        break;
      case kDeviceOrdinal:
        (void)give(out[i], -2);
        break;
      case kMemoryType:
      case kSyncMemops:
      case kAccessFlags:
        (void)give(out[i], 0u);
        break;
      default:
        // These are bool, of one byte.
        (void)give(out[i], false);
    }
    if (!known) continue;
    const bool is_bool = attributes[i] == kIsManaged || attributes[i] == kIpcCapable || attributes[i] == kIsMapped ||
                         attributes[i] == kGpuDirect;
    unsigned value = 0;
    if (!is_bool) {
      (void)attribute_of(out[i], attributes[i], p);
    } else if (attribute_of(&value, attributes[i], p) == kOk) {
      (void)give(out[i], value != 0);
    }
  }
  return kOk;
}

// Copies and fills.
namespace {

int copy_on(void* stream, uint64_t dst, uint64_t src, size_t bytes) {
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (!reaches(*s->context, dst, bytes, true) || !reaches(*s->context, src, bytes, true)) return kInvalidValue;
  return put(stream, [=] {
    const Access access(nullptr);
    std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
  });
}
template <class T>
int set_on(void* stream, uint64_t dst, T value, size_t n) {
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (!reaches(*s->context, dst, n * sizeof(T))) return kInvalidValue;
  return put(stream, [=] {
    const Access access(nullptr);
    auto* const to = reinterpret_cast<char*>(dst);
    for (size_t i = 0; i < n; ++i) std::memcpy(to + i * sizeof(T), &value, sizeof(T));
  });
}
// A copy to or from memory that is not page-locked is complete when the call returns. A small amount of such memory is
// read at once.
constexpr size_t kAtOnce = 64 << 10;
int after_pageable(const void* host, size_t bytes, void* stream) {
  if (bytes == 0 || !rule("IMPLICIT_SYNC")) return kOk;
  {
    const std::lock_guard lock(machine().mutex);
    if (is_pinned(reinterpret_cast<uint64_t>(host)) || find_device(reinterpret_cast<uint64_t>(host)) != nullptr)
      return kOk;
  }
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr || is_captured(*s)) return kOk;
  // On an H200, another thread's copy of this kind waits meanwhile, whatever its stream.
  const std::lock_guard one_at_a_time(s->context->pageable);
  s->wait_for(s->submitted());
  return s->context->failed.load();
}
bool on_device(uint64_t p) {
  const std::lock_guard lock(machine().mutex);
  return find_device(p) != nullptr;
}
int copy_now(uint64_t dst, uint64_t src, size_t bytes) {
  count_host_wait();
  if (const int rc = copy_on(nullptr, dst, src, bytes); rc != kOk) return rc;
  const std::shared_ptr<Stream> s = stream_of(nullptr);
  s->wait_for(s->submitted());
  return s->context->failed.load();
}

}  // namespace

EXPORT int cuMemcpyPeerAsync(uint64_t dst, void* dst_context, uint64_t src, void* src_context, size_t bytes,
                             void* stream) {
  MOECCL_IN_CONTEXT(context);
  if (!is_context(dst_context) || !is_context(src_context)) return kInvalidContext;
  return copy_on(stream, dst, src, bytes);
}
EXPORT int cuMemcpyDtoDAsync_v2(uint64_t dst, uint64_t src, size_t bytes, void* stream) {
  MOECCL_IN_CONTEXT(context);
  return copy_on(stream, dst, src, bytes);
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t dst, const void* src, size_t bytes, void* stream) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  if (const int rc = copy_on(stream, dst, reinterpret_cast<uint64_t>(src), bytes); rc != kOk) return rc;
  return bytes > kAtOnce ? after_pageable(src, bytes, stream) : kOk;
}
EXPORT int cuMemcpyDtoHAsync_v2(void* dst, uint64_t src, size_t bytes, void* stream) {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  if (const int rc = copy_on(stream, reinterpret_cast<uint64_t>(dst), src, bytes); rc != kOk) return rc;
  return after_pageable(dst, bytes, stream);
}
// It finds out itself which side is not CUDA memory.
EXPORT int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void* stream) {
  if (!on_device(dst)) count_host_wait();  // the host is about to look at it
  MOECCL_IN_CONTEXT(context);
  if (const int rc = copy_on(stream, dst, src, bytes); rc != kOk) return rc;
  if (const int rc = after_pageable(reinterpret_cast<void*>(dst), bytes, stream); rc != kOk) return rc;
  return bytes > kAtOnce ? after_pageable(reinterpret_cast<void*>(src), bytes, stream) : kOk;
}
EXPORT int cuMemcpy(uint64_t dst, uint64_t src, size_t bytes) {
  MOECCL_IN_CONTEXT(context);
  return copy_now(dst, src, bytes);
}
EXPORT int cuMemcpyHtoD_v2(uint64_t dst, const void* src, size_t bytes) {
  MOECCL_IN_CONTEXT(context);
  return copy_now(dst, reinterpret_cast<uint64_t>(src), bytes);
}
EXPORT int cuMemcpyDtoH_v2(void* dst, uint64_t src, size_t bytes) {
  MOECCL_IN_CONTEXT(context);
  return copy_now(reinterpret_cast<uint64_t>(dst), src, bytes);
}
EXPORT int cuMemsetD8Async(uint64_t dst, unsigned char value, size_t n, void* stream) {
  MOECCL_IN_CONTEXT(context);
  return set_on(stream, dst, value, n);
}
EXPORT int cuMemsetD32Async(uint64_t dst, unsigned value, size_t n, void* stream) {
  MOECCL_IN_CONTEXT(context);
  return dst % 4 == 0 ? set_on(stream, dst, value, n) : kInvalidValue;
}
