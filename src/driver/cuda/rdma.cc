// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/rdma.h"

namespace moeccl::driver::cuda {

namespace {

// Numbers of the driver's interface: attributes, the kind of a range's handle, options, scopes.
constexpr int kRdmaSupported = 116, kFlushOptions = 117, kWritesOrdering = 118, kDmabufSupported = 124;
constexpr int kDmabuf = 1, kFlushFromHost = 1, kOrderedForOwner = 100, kThisContext = 0;

using GetHandle = int (*)(void* handle, Pointer base, size_t bytes, int kind, unsigned long long flags);
using Flush = int (*)(int target, int scope);

GetHandle get_handle() { return reinterpret_cast<GetHandle>(driver_symbol("cuMemGetHandleForAddressRange")); }
Flush flush() { return reinterpret_cast<Flush>(driver_symbol("cuFlushGPUDirectRDMAWrites")); }

}  // namespace

RdmaAbility rdma_ability() {
  RdmaAbility a;
  int device = 0;
  if (driver() == nullptr || driver()->cuCtxGetDevice(&device) != 0) return a;
  const auto attribute = [device](int which) {
    int value = 0;  // stays 0 for older drivers, which do not know the attribute
    return driver()->cuDeviceGetAttribute(&value, which, device) == 0 ? value : 0;
  };
  a.supported = attribute(kRdmaSupported) != 0;
  a.dmabuf = attribute(kDmabufSupported) != 0 && get_handle() != nullptr;
  if (attribute(kWritesOrdering) >= kOrderedForOwner) {
    a.writes = RemoteWrites::kOrdered;
  } else if ((attribute(kFlushOptions) & kFlushFromHost) != 0 && flush() != nullptr) {
    a.writes = RemoteWrites::kCall;
  }
  return a;
}

Result<Fd> dmabuf_of(const std::byte* base, size_t bytes) {
  int fd = -1;
  MOECCL_TRY(check(get_handle()(&fd, reinterpret_cast<Pointer>(base), bytes, kDmabuf, 0),
                   format("a dma-buf of {} bytes of device memory", bytes)));
  return Fd(fd);
}

Status flush_remote_writes() {
  return check(flush()(kThisContext, kOrderedForOwner), "a flush of what NICs have written");
}

}  // namespace moeccl::driver::cuda
