// SPDX-License-Identifier: Apache-2.0
// Device memory that the ranks of a host share between processes by descriptors.
#pragma once

#include <cstdint>
#include <vector>

#include "src/driver/cuda/vmm.h"
#include "src/world/hosts.h"
#include "src/world/neighbours.h"
#include "transport/cuda_ipc/cuda_link.h"

namespace moeccl::comm {

class DeviceObjects {
 public:
  // Collective call of the ranks of this host: sends a descriptor of `own` to all ranks of other processes. Null: this
  // rank shares none.
  static Result<DeviceObjects> exchange(HostSession& session, const Neighbours& n,
                                        const driver::cuda::VirtualMemory* own);
  // bytes: mapped_bytes() of the rank's object.
  Result<transport::cuda_ipc::Opened> open(driver::cuda::Context context, uint32_t rank, uint64_t bytes) const;

 private:
  std::vector<std::vector<Fd>> descriptors_;  // [n_ranks][]
};

}  // namespace moeccl::comm
