// SPDX-License-Identifier: Apache-2.0
#include "src/world/device_objects.h"

#include "src/base/log.h"

namespace moeccl::comm {

Result<DeviceObjects> DeviceObjects::exchange(HostSession& session, const Neighbours& n,
                                              const driver::cuda::VirtualMemory* own) {
  Fd shared;
  if (own != nullptr) {
    auto made = own->share();
    if (made.ok())
      shared = std::move(*made);
    else
      log(LogLevel::kInfo, "rank {}: {}", n.rank, made.status().message());
  }
  const int fd = shared.get();
  bootstrap::RankSet wanted(n.n_ranks, false);
  for (const uint32_t r : n.hosts->around(n.rank)) wanted[r] = !n.same_process(r);
  DeviceObjects all;
  MOECCL_ASSIGN_OR_RETURN(all.descriptors_,
                          session.all_gather_fds(std::span<const int>(&fd, shared ? 1 : 0), wanted, n.deadline));
  return all;
}

Result<transport::cuda_ipc::Opened> DeviceObjects::open(driver::cuda::Context context, uint32_t rank,
                                                        uint64_t bytes) const {
  if (descriptors_.size() <= rank || descriptors_[rank].empty())
    return error(moecclRemoteError, "rank {}'s descriptor of its memory did not come", rank);
  MOECCL_ASSIGN_OR_RETURN(auto memory, driver::cuda::VirtualMemory::open(context, descriptors_[rank][0], bytes));
  return transport::cuda_ipc::Opened::of(std::move(memory));
}

}  // namespace moeccl::comm
