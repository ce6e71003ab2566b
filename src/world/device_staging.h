// SPDX-License-Identifier: Apache-2.0
// The device memory in which operations that run step by step are staged: how a rank makes its own, and how it reaches
// that of the other ranks of its host.
#pragma once

#include <cstdint>
#include <vector>

#include "src/exec/cuda/peer_memory.h"
#include "src/exec/fabric.h"
#include "src/world/device_objects.h"
#include "src/world/neighbours.h"
#include "transport/cuda_ipc/cuda_link.h"

namespace moeccl::comm {

// A rank's staging as the other ranks need to know it.
struct StagingOffer {
  // How other processes open it.
  enum Way : uint32_t { kNotOpened, kByHandle, kByDescriptor };
  uint32_t way = kNotOpened;
  int32_t device = 0;
  uint64_t address = 0;  // used by threads of the same process
  uint64_t mapped = 0;   // kByDescriptor: size of the object
  uint64_t slot = 0;     // kByDescriptor: largest message slot that fits, in bytes; all ranks use the least
  driver::cuda::IpcHandle handle{};
};

class DeviceStaging {
 public:
  explicit DeviceStaging(const Neighbours& n) : n_(n) {}
  // Allocates this rank's staging on the context's device.
  Result<StagingOffer> make(driver::cuda::Context context, int device);
  // Collective call of the ranks of this host: sends descriptors to all ranks of other processes. offers: [n_ranks].
  Status exchange(HostSession& session, std::vector<StagingOffer> offers);
  // Makes the staging of all ranks of this host accessible to this rank's device. Otherwise returns the first reason.
  Status reach_all(driver::cuda::Context context);

  // For a rank of this host that was reached: its staging as this rank's device accesses it, the message slots of the
  // pair, and what keeps the memory of another process open.
  std::byte* of(uint32_t r) const;
  exec::DeviceSlots slots_with(uint32_t r) const;
  transport::cuda_ipc::Opened take_opened(uint32_t r);
  exec::PeerMemory take_own() { return std::move(own_); }

 private:
  const std::vector<uint32_t>& here() const { return n_.hosts->around(n_.rank); }
  uint64_t slots_at() const;
  Result<transport::cuda_ipc::Opened> open(uint32_t r, driver::cuda::Context context) const;
  Status reach(uint32_t r, driver::cuda::Context context);

  const Neighbours& n_;
  exec::PeerMemory own_;
  std::vector<StagingOffer> offers_;                 // [n_ranks]
  std::vector<transport::cuda_ipc::Opened> opened_;  // [n_ranks], of other processes
  DeviceObjects objects_;
};

}  // namespace moeccl::comm
