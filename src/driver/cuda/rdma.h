// SPDX-License-Identifier: Apache-2.0
// Device memory that NICs read and write themselves (GPUDirect RDMA).
#pragma once

#include "src/base/fd.h"
#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

// The action that is needed between a NIC's write into device memory and a kernel that reads it.
enum class RemoteWrites : uint8_t {
  kOrdered,  // nothing
  kCall,     // flush_remote_writes()
  kRead,     // a NIC reads from the same memory, because a read does not overtake writes
};
struct RdmaAbility {
  bool supported = false;
  bool dmabuf = false;  // dmabuf_of() works
  RemoteWrites writes = RemoteWrites::kRead;
};
// Returns the abilities of the current context's device.
RdmaAbility rdma_ability();

// Exports whole pages of the current context's device memory as a file that a NIC's driver understands.
Result<Fd> dmabuf_of(const std::byte* base, size_t bytes);
// Makes earlier writes of NICs visible to kernels of the current context that start from now on.
Status flush_remote_writes();

}  // namespace moeccl::driver::cuda
