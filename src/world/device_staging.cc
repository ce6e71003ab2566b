// SPDX-License-Identifier: Apache-2.0
#include "src/world/device_staging.h"

#include <algorithm>
#include <utility>

#include "src/base/env.h"
#include "transport/shm/segment.h"

namespace moeccl::comm {

namespace cuda = driver::cuda;

// Message slots in device memory follow the staging, in the order of the sources among the ranks of this host. They
// are only in objects shared by descriptor, because such memory stays as long as a peer that still writes has it open.
static constexpr uint64_t kSlotUnit = 4096;
uint64_t DeviceStaging::slots_at() const { return (n_.shape.staging_bytes + kSlotUnit - 1) / kSlotUnit * kSlotUnit; }

Result<StagingOffer> DeviceStaging::make(cuda::Context context, int device) {
  const uint64_t slot = static_cast<uint64_t>(env().cuda_message_bytes) / kSlotUnit * kSlotUnit;
  // A NIC registers whole pages. Allocations of whole blocks share no page with others.
  constexpr size_t kBlock = size_t{2} << 20;
  const size_t block = n_.hosts->n() > 1 ? kBlock : 1;
  exec::PeerMemory::Bytes bytes;
  bytes.plain = (n_.shape.staging_bytes + block - 1) / block * block;
  if (!n_.one_process()) bytes.object = slots_at() + here().size() * transport::shm::kMessageSlots * slot;
  MOECCL_ASSIGN_OR_RETURN(own_, exec::PeerMemory::create(context, bytes));
  StagingOffer offer;
  offer.device = device;
  offer.address = reinterpret_cast<uint64_t>(own_.data());
  if (own_.object() != nullptr) {
    offer.way = StagingOffer::kByDescriptor;
    offer.mapped = own_.bytes();
    offer.slot = slot;
  } else if (!n_.one_process()) {
    const auto handle = transport::cuda_ipc::export_memory(context, own_.data());
    if (handle.ok()) offer.way = StagingOffer::kByHandle, offer.handle = *handle;
  }
  return offer;
}

Status DeviceStaging::exchange(HostSession& session, std::vector<StagingOffer> offers) {
  offers_ = std::move(offers);
  opened_.resize(n_.n_ranks);
  const auto shares = [&](uint32_t r) { return offers_[r].way == StagingOffer::kByDescriptor; };
  if (std::none_of(here().begin(), here().end(), shares)) return {};
  MOECCL_ASSIGN_OR_RETURN(objects_, DeviceObjects::exchange(session, n_, own_.object()));
  return {};
}

Status DeviceStaging::reach_all(cuda::Context context) {
  if (!env().cuda_ipc) return error(moecclUnsupported, "MOECCL_CUDA_IPC=0");
  for (const uint32_t r : here()) {
    if (r != n_.rank) MOECCL_TRY(reach(r, context));
  }
  const auto head = std::find_if(here().begin(), here().end(), [&](uint32_t r) { return n_.same_process(r); });
  own_.join(reinterpret_cast<std::byte*>(offers_[*head].address));
  return {};
}

Result<transport::cuda_ipc::Opened> DeviceStaging::open(uint32_t r, cuda::Context context) const {
  const StagingOffer& offer = offers_[r];
  if (offer.way == StagingOffer::kByHandle) return transport::cuda_ipc::Opened::open(context, offer.handle);
  if (offer.way == StagingOffer::kByDescriptor) return objects_.open(context, r, offer.mapped);
  return error(moecclUnsupported, "it has no handle for other processes");
}

// Memory is used as it is on the same device, with peer access on another device, and through a handle or descriptor in
// another process.
Status DeviceStaging::reach(uint32_t r, cuda::Context context) {
  if (!n_.same_process(r)) {
    auto opened = open(r, context);
    if (!opened.ok())
      return std::move(opened).status().with_context(format("rank {}'s device memory cannot be opened", r));
    opened_[r] = std::move(*opened);
    return {};
  }
  const int own = offers_[n_.rank].device, other = offers_[r].device;
  if (other == own) return {};
  const std::string what = format("access of device {} to the memory of device {} (rank {})", own, other, r);
  int can = 0;
  MOECCL_TRY(cuda::check(cuda::driver()->cuDeviceCanAccessPeer(&can, own, other), what));
  if (can == 0) return error(moecclUnsupported, "no {}", what);
  cuda::Context theirs = nullptr;
  MOECCL_TRY(cuda::check(cuda::driver()->cuDevicePrimaryCtxRetain(&theirs, other), what));
  const int rc = cuda::driver()->cuCtxEnablePeerAccess(theirs, 0);
  if (rc != cuda::kPeerAlreadyEnabled) MOECCL_TRY(cuda::check(rc, what));
  // Peer access covers only memory of cuMemAlloc.
  if (offers_[r].way != StagingOffer::kByDescriptor) return {};
  return cuda::allow_access(reinterpret_cast<const void*>(offers_[r].address), offers_[r].mapped);
}

std::byte* DeviceStaging::of(uint32_t r) const {
  return n_.same_process(r) ? reinterpret_cast<std::byte*>(offers_[r].address) : opened_[r].data();
}

exec::DeviceSlots DeviceStaging::slots_with(uint32_t r) const {
  uint64_t slot = ~uint64_t{0};
  for (const uint32_t other : here()) slot = std::min(slot, offers_[other].slot);
  if (slot == 0) return {};
  const auto slots = [&](uint32_t owner, uint32_t source) {
    const auto place = static_cast<uint64_t>(std::find(here().begin(), here().end(), source) - here().begin());
    return of(owner) + slots_at() + place * transport::shm::kMessageSlots * slot;
  };
  return {slots(r, n_.rank), slots(n_.rank, r), slot};
}

transport::cuda_ipc::Opened DeviceStaging::take_opened(uint32_t r) { return std::move(opened_[r]); }

}  // namespace moeccl::comm
