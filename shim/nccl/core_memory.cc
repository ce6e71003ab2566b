// SPDX-License-Identifier: Apache-2.0
// Memory, and its registrations.
#include <mutex>
#include <optional>
#include <unordered_map>

#include "shim/nccl/core.h"
#include "shim/nccl/device.h"
#include "shim/nccl/join.h"
#include "shim/nccl/ours.h"

namespace moeccl::shim {
namespace {

// What MemAlloc has made: each with its device's ordinal, -1 on the host.
struct Allocations {
  std::mutex mutex;
  std::unordered_map<void*, int> all;
};
Allocations& allocations() {
  static auto* const a = new Allocations;  // never destroyed: programs free in their own destructors
  return *a;
}

// `ordinal` is the device's; -1 for host memory.
ncclResult_t free_memory(void* ptr, int ordinal) {
  if (ordinal < 0) return from_moeccl(moecclMemFree(ptr));
  const device::Current current(ordinal);  // a destructor may run on a thread that has used no device
  if (current.ok() && device::release(ptr)) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "ncclMemFree: device " + std::to_string(ordinal) + " refuses");
}

}  // namespace

namespace core {

ncclResult_t MemAlloc(void** ptr, size_t size) {
  if (ptr == nullptr) return fail(ncclInvalidArgument, "ncclMemAlloc: ptr is NULL: give the address of a pointer");
  *ptr = nullptr;
  std::string reason;
  if (wants_nccl(&reason)) return MOECCL_FORWARD(MemAlloc, ptr, size);
  // A program on a GPU expects memory that its kernels can access.
  const bool on_device = moeccl_serves_cuda();
  if (on_device) {
    *ptr = device::allocate(size);
    if (*ptr == nullptr) {
      return fail(ncclUnhandledCudaError, "ncclMemAlloc: the device gives no " + std::to_string(size) + " bytes");
    }
  } else {
    const ncclResult_t result = from_moeccl(moecclMemAlloc(ptr, size));
    if (result != ncclSuccess) return result;
  }
  const std::lock_guard lock(allocations().mutex);
  allocations().all.emplace(*ptr, on_device ? device::current() : -1);
  return ncclSuccess;
}

ncclResult_t MemFree(void* ptr) {
  if (ptr == nullptr) return ncclSuccess;
  std::optional<int> ordinal;
  {
    const std::lock_guard lock(allocations().mutex);
    // Forgotten before it is freed, because the address may be another thread's next.
    if (const auto taken = allocations().all.extract(ptr); !taken.empty()) ordinal = taken.mapped();
  }
  if (ordinal) {
    const ncclResult_t result = free_memory(ptr, *ordinal);
    if (result == ncclSuccess) return result;
    const std::lock_guard lock(allocations().mutex);
    allocations().all.emplace(ptr, *ordinal);
    return result;
  }
  if (real_if_open() != nullptr) return MOECCL_FORWARD(MemFree, ptr);
  return fail(ncclInvalidArgument, "ncclMemFree: the pointer is not one of ncclMemAlloc, or was freed before");
}

ncclResult_t CommRegister(const ncclComm_t comm, void* buffer, size_t size, void** handle) {
  if (handle == nullptr) return fail(ncclInvalidArgument, "ncclCommRegister: handle is NULL");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kUsable, CommRegister, target.real, buffer, size, handle);
  return from_moeccl(moecclCommRegister(target.ours->ours, buffer, size, handle));
}

ncclResult_t CommDeregister(const ncclComm_t comm, void* handle) {
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommDeregister, target.real, handle);
  if (handle == nullptr) return ncclSuccess;  // as in NCCL
  const ncclResult_t done = from_moeccl(moecclCommDeregister(target.ours->ours, handle));
  return done == ncclInvalidArgument ? ncclInvalidUsage : done;  // NCCL's code for a handle that it does not know
}

ncclResult_t CommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  if (value == nullptr) return fail(ncclInvalidArgument, "ncclCommMemStats: value is NULL");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommMemStats, target.real, stat, value);
  *value = 0;
  switch (stat) {
    case ncclStatGpuMemSuspend:
      return ncclSuccess;  // nothing is given back
    case ncclStatGpuMemSuspended:
      *value = target.ours->suspended ? 1 : 0;
      return ncclSuccess;
    case ncclStatGpuMemPersist:
    case ncclStatGpuMemTotal: {
      // Host memory stands in for the device's where there is no device, as buffers do.
      size_t bytes = 0;
      const ncclResult_t asked = from_moeccl(moecclCommMemoryUsage(target.ours->ours, &bytes));
      *value = bytes;
      return asked;
    }
  }
  return fail(ncclInvalidArgument,
              "ncclCommMemStats: stat is " + std::to_string(static_cast<int>(stat)) + ": give an ncclCommMemStat_t");
}

}  // namespace core
}  // namespace moeccl::shim
