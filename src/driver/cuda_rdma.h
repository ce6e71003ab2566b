// SPDX-License-Identifier: Apache-2.0
// Device memory that NICs read and write themselves (GPUDirect RDMA).
#pragma once

#include "src/base/fd.h"
#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

// What has to happen between a NIC's write into device memory and a kernel that reads it.
enum class RemoteWrites : uint8_t {
  kOrdered,  // nothing
  kCall,     // flush_remote_writes()
  kRead,     // the NIC reads from the same memory: a read does not overtake writes
};
struct RdmaAbility {
  bool supported = false;
  bool dmabuf = false;  // dmabuf_of()
  RemoteWrites writes = RemoteWrites::kRead;
};
// Of the current context's device.
RdmaAbility rdma_ability();

// Whole pages of device memory as a file that a NIC's driver understands. Of the current context.
Result<Fd> dmabuf_of(const std::byte* base, size_t bytes);
// What NICs have written before is seen by kernels of the current context that start from now on.
Status flush_remote_writes();

}  // namespace moeccl::driver::cuda
