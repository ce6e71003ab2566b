// SPDX-License-Identifier: Apache-2.0
// The emulated driver's stream-ordered memory: pools. Peer access does not apply to it; cuMemPoolSetAccess does.
#include <unistd.h>

#include <sys/mman.h>

#include <utility>

#include "tests/support/cuda_emulation/stream.h"

namespace {

using namespace moeccl::emulation::driver;

struct Pool {
  int device = 0;
  uint32_t access = 0;  // bit by device
  std::map<int, uint64_t> attributes;
};
Handles<Pool>& pools() {
  static auto* const all = new Handles<Pool>;
  return *all;
}
std::shared_ptr<Pool> make_pool(int device) {
  auto pool = std::make_shared<Pool>();
  pool->device = device;
  pool->access = 1u << device;
  return pool;
}
Pool* default_pool(int device) {
  static auto* const all = new std::map<int, void*>;
  const std::lock_guard lock(machine().mutex);
  void*& handle = (*all)[device];
  if (handle == nullptr) handle = pools().add(make_pool(device));
  return static_cast<Pool*>(handle);
}
struct Location {
  int type, id;
};
struct AccessTo {
  Location location;
  int flags;
};

int allocate(uint64_t* out, size_t bytes, Pool* pool, void* stream) {
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (s == nullptr) return kInvalidHandle;
  if (bytes == 0) return kInvalidValue;
  Allocation a;
  a.device = pool->device;
  a.pool = pool;
  {
    const std::lock_guard lock(machine().mutex);
    a.access = pool->access;
  }
  return allocate_device(bytes, out, a);
}

}  // namespace

EXPORT int cuDeviceGetDefaultMemPool(void** pool, int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  return *pool = default_pool(device), kOk;
}
EXPORT int cuDeviceGetMemPool(void** pool, int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  return *pool = default_pool(device), kOk;
}
EXPORT int cuMemPoolCreate(void** pool, const void* properties) {
  MOECCL_IN_CONTEXT(context);
  // Type and handles come first, then the location.
  const auto* words = static_cast<const int*>(properties);
  if (words[3] < 0 || words[3] >= n_devices()) return kInvalidDevice;
  return *pool = pools().add(make_pool(words[3])), kOk;
}
EXPORT int cuMemPoolDestroy(void* pool) {
  MOECCL_IN_CONTEXT(context);
  return pools().remove(pool) != nullptr ? kOk : kInvalidValue;
}
EXPORT int cuMemPoolSetAttribute(void* pool, int attribute, void* value) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Pool> p = pools().find(pool);
  if (p == nullptr) return kInvalidValue;
  const std::lock_guard lock(machine().mutex);
  // The first three attributes are int.
  return p->attributes[attribute] = attribute <= 3 ? *static_cast<uint32_t*>(value) : *static_cast<uint64_t*>(value),
         kOk;
}
EXPORT int cuMemPoolGetAttribute(void* pool, int attribute, void* value) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Pool> p = pools().find(pool);
  if (p == nullptr) return kInvalidValue;
  const std::lock_guard lock(machine().mutex);
  const uint64_t v = p->attributes[attribute];
  if (attribute <= 3)
    *static_cast<uint32_t*>(value) = static_cast<uint32_t>(v);
  else
    *static_cast<uint64_t*>(value) = v;
  return kOk;
}
EXPORT int cuMemPoolTrimTo(void* pool, size_t) {
  MOECCL_IN_CONTEXT(context);
  return pools().find(pool) != nullptr ? kOk : kInvalidValue;
}
// Memory that the pool has already given becomes reachable too, as on a device.
EXPORT int cuMemPoolSetAccess(void* pool, const void* list, size_t n) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Pool> p = pools().find(pool);
  if (p == nullptr) return kInvalidValue;
  const std::lock_guard lock(machine().mutex);
  for (size_t i = 0; i < n; ++i) {
    const AccessTo& a = static_cast<const AccessTo*>(list)[i];
    if (a.location.id < 0 || a.location.id >= n_devices()) return kInvalidDevice;
    if (a.location.id == p->device && a.flags == 0) return kInvalidValue;  // its own device cannot lose access
    const uint32_t bit = 1u << a.location.id;
    p->access = a.flags != 0 ? p->access | bit : p->access & ~bit;
  }
  for (auto& [base, a] : machine().device) {
    if (a.pool != p.get()) continue;
    a.access = p->access;
    protect(base, a);
  }
  return kOk;
}
EXPORT int cuMemPoolGetAccess(int* flags, void* pool, const void* location) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Pool> p = pools().find(pool);
  if (p == nullptr) return kInvalidValue;
  const std::lock_guard lock(machine().mutex);
  return *flags = (p->access >> static_cast<const Location*>(location)->id & 1u) != 0 ? 3 : 0, kOk;
}
EXPORT int cuMemAllocAsync(uint64_t* out, size_t bytes, void* stream) {
  MOECCL_IN_CONTEXT(context);
  return allocate(out, bytes, default_pool(context->device), stream);
}
EXPORT int cuMemAllocFromPoolAsync(uint64_t* out, size_t bytes, void* pool, void* stream) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Pool> p = pools().find(pool);
  return p == nullptr ? kInvalidValue : allocate(out, bytes, p.get(), stream);
}
// The memory is freed in the stream's order, and its address is not reused before that.
EXPORT int cuMemFreeAsync(uint64_t p, void* stream) {
  MOECCL_IN_CONTEXT(context);
  Allocation a;
  {
    const std::lock_guard lock(machine().mutex);
    const auto it = machine().device.find(p);
    if (it == machine().device.end() || it->second.opened > 0 || it->second.mapped) return kInvalidValue;
    a = it->second;
  }
  return put(stream, [p, a] {
    const std::lock_guard lock(machine().mutex);
    const auto it = machine().device.find(p);
    if (it == machine().device.end() || it->second.fd != a.fd) return;  // the context was reset meanwhile
    machine().device.erase(it);
    munmap(reinterpret_cast<void*>(p), a.bytes);
    close(a.fd);
  });
}
