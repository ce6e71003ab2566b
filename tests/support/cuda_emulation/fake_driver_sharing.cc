// SPDX-License-Identifier: Apache-2.0
// The emulated driver's sharing of memory between processes: IPC handles, and objects that travel as file descriptors.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/support/cuda_emulation/fake_driver.h"

using namespace moeccl::emulation::driver;

namespace {
struct Handle {
  int pid, fd, device;
  uint64_t bytes;
};
}  // namespace

EXPORT int cuIpcGetMemHandle(void* handle, uint64_t p) {
  MOECCL_IN_CONTEXT(context);
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().device.find(p);
  // As in the real driver, memory of cuMemMap and of pools has no such handle, and an opened handle cannot be passed
  // on.
  if (it == machine().device.end() || it->second.mapped || it->second.pool != nullptr || it->second.opened > 0)
    return kInvalidValue;
  it->second.given_out = true;
  const Handle h{getpid(), it->second.fd, it->second.device, it->second.bytes};
  std::memset(handle, 0, 64);
  std::memcpy(handle, &h, sizeof(h));
  return kOk;
}
struct HandleBytes {
  char bytes[64];
};
EXPORT int cuIpcOpenMemHandle_v2(uint64_t* out, HandleBytes handle, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  constexpr unsigned kLazyPeerAccess = 1;
  if (flags != kLazyPeerAccess) return kInvalidValue;
  Handle h{};
  std::memcpy(&h, handle.bytes, sizeof(h));
  MOECCL_UNSAFE();
  if (h.pid == getpid()) return kInvalidContext;  // as in the real driver, a process cannot open its own memory
  {
    const std::lock_guard lock(machine().mutex);
    for (auto& [base, a] : machine().device) {
      const bool same = a.opened > 0 && a.source_pid == h.pid && a.source_fd == h.fd && a.opener == context->device;
      if (!same) continue;
      ++a.opened;
      return *out = base, kOk;
    }
  }
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%d/fd/%d", h.pid, h.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return kInvalidValue;
  Allocation a;
  a.bytes = h.bytes;
  a.fd = fd;
  a.device = h.device;
  a.opener = context->device;
  a.access = 1u << context->device;
  a.opened = 1;
  a.source_pid = h.pid;
  a.source_fd = h.fd;
  return map_device(fd, h.bytes, out, a);
}
EXPORT int cuIpcCloseMemHandle(uint64_t p) {
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  synchronizes_alone(*context);
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().device.find(p);
  if (it == machine().device.end() || it->second.opened == 0) return kInvalidValue;
  if (--it->second.opened > 0) return kOk;
  munmap(reinterpret_cast<void*>(p), it->second.bytes);
  close(it->second.fd);
  machine().device.erase(it);
  return kOk;
}

// Memory by file descriptors: an object is a shared file, and a range of addresses holds one object or nothing.
namespace {
constexpr size_t kUnit = size_t{2} << 20;
const std::string kObjectName = "emulated-device-object-";
struct Objects {
  std::map<uint64_t, int> fd;         // by handle
  std::map<uint64_t, int> device;     // by handle: the device that it is on
  std::map<uint64_t, size_t> ranges;  // reserved addresses
  uint64_t next = 1;
  int imported = 0;
};
Objects& objects() {
  static auto* o = new Objects;
  return *o;
}
void may_synchronize() {
  if (Context* const context = current_context(); context != nullptr && rule("UNMAP_WAITS", false))
    synchronizes_alone(*context);
}
uint64_t add_object(int fd, int device) {
  const uint64_t handle = objects().next++;
  objects().fd[handle] = fd;
  objects().device[handle] = device;
  return handle;
}
}  // namespace

// For tests: returns how often this process opened an object of another process.
EXPORT int moeccl_emulated_imports() {
  const std::lock_guard lock(machine().mutex);
  return objects().imported;
}
EXPORT int cuMemGetAllocationGranularity(size_t* unit, const void*, int) {
  MOECCL_CALL();
  return *unit = kUnit, kOk;
}
EXPORT int cuMemCreate(uint64_t* handle, size_t bytes, const void* properties, unsigned long long) {
  MOECCL_CALL();
  if (bytes == 0 || bytes % kUnit != 0) return kInvalidValue;
  const int device = static_cast<const int*>(properties)[3];  // after type, handles and the kind of location
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  // The name tells the device, to other processes too.
  const int fd = memfd_create((kObjectName + std::to_string(device)).c_str(), MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) return kOutOfMemory;
  spoil(fd, bytes);
  const std::lock_guard lock(machine().mutex);
  return *handle = add_object(fd, device), kOk;
}
EXPORT int cuMemRelease(uint64_t handle) {
  MOECCL_CALL();
  may_synchronize();
  const std::lock_guard lock(machine().mutex);
  const auto it = objects().fd.find(handle);
  if (it == objects().fd.end()) return kInvalidValue;
  close(it->second);
  objects().fd.erase(it);
  return kOk;
}
EXPORT int cuMemAddressReserve(uint64_t* out, size_t bytes, size_t, uint64_t, unsigned long long) {
  MOECCL_CALL();
  if (bytes == 0 || bytes % kUnit != 0) return kInvalidValue;
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return kOutOfMemory;
  const std::lock_guard lock(machine().mutex);
  objects().ranges[*out = reinterpret_cast<uint64_t>(p)] = bytes;
  return kOk;
}
EXPORT int cuMemAddressFree(uint64_t p, size_t bytes) {
  MOECCL_CALL();
  const std::lock_guard lock(machine().mutex);
  const auto it = objects().ranges.find(p);
  if (it == objects().ranges.end() || it->second != bytes || machine().device.count(p) > 0) return kInvalidValue;
  munmap(reinterpret_cast<void*>(p), bytes);
  objects().ranges.erase(it);
  return kOk;
}
EXPORT int cuMemMap(uint64_t p, size_t bytes, size_t offset, uint64_t handle, unsigned long long) {
  MOECCL_CALL();
  const std::lock_guard lock(machine().mutex);
  const auto object = objects().fd.find(handle);
  const auto range = objects().ranges.find(p);
  struct stat file = {};
  if (object == objects().fd.end() || range == objects().ranges.end() || range->second != bytes || offset != 0 ||
      fstat(object->second, &file) != 0 || static_cast<size_t>(file.st_size) != bytes)
    return kInvalidValue;
  if (mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, object->second, 0) == MAP_FAILED)
    return kOutOfMemory;
  Allocation a;
  a.bytes = bytes;
  a.mapped = true;
  a.fd = fcntl(object->second, F_DUPFD_CLOEXEC, 0);
  a.device = objects().device[handle];
  machine().device[p] = a;
  return kOk;
}
EXPORT int cuMemUnmap(uint64_t p, size_t bytes) {
  MOECCL_CALL();
  may_synchronize();
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().device.find(p);
  if (it == machine().device.end() || !it->second.mapped || it->second.bytes != bytes) return kInvalidValue;
  close(it->second.fd);
  machine().device.erase(it);
  (void)mmap(reinterpret_cast<void*>(p), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0);
  return kOk;
}
EXPORT int cuMemSetAccess(uint64_t p, size_t bytes, const void* list, size_t n) {
  MOECCL_CALL();
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().device.find(p);
  if (it == machine().device.end() || !it->second.mapped || it->second.bytes != bytes) return kInvalidValue;
  struct AccessTo {
    int type, id, flags;
  };
  for (size_t i = 0; i < n; ++i) {
    const AccessTo& a = static_cast<const AccessTo*>(list)[i];
    if (a.id < 0 || a.id >= n_devices()) return kInvalidDevice;
    const uint32_t bit = 1u << a.id;
    it->second.access = a.flags != 0 ? it->second.access | bit : it->second.access & ~bit;
  }
  protect(p, it->second);
  return kOk;
}
EXPORT int cuMemExportToShareableHandle(void* out, uint64_t handle, int type, unsigned long long) {
  MOECCL_CALL();
  const std::lock_guard lock(machine().mutex);
  const auto it = objects().fd.find(handle);
  if (it == objects().fd.end() || type != 1) return kInvalidValue;
  const int fd = fcntl(it->second, F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kOutOfMemory;
  std::memcpy(out, &fd, sizeof(fd));
  return kOk;
}
EXPORT int cuMemImportFromShareableHandle(uint64_t* handle, void* descriptor, int type) {
  MOECCL_CALL();
  if (type != 1) return kInvalidValue;
  // The descriptor itself is passed in place of an address.
  const int fd = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), F_DUPFD_CLOEXEC, 0);
  if (fd < 0) return kInvalidValue;
  const std::lock_guard lock(machine().mutex);
  ++objects().imported;
  char name[128] = {};
  (void)!readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), name, sizeof(name) - 1);
  const char* const place = std::strstr(name, kObjectName.c_str());
  if (place == nullptr) return close(fd), kInvalidValue;
  return *handle = add_object(fd, std::atoi(place + kObjectName.size())), kOk;
}
