// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/offer.h"

#include <algorithm>

#include "src/base/env.h"

namespace moeccl::transport::verbs {
namespace {

constexpr uint16_t kVersion = 5;
constexpr size_t kMaxName = 63, kMaxAddress = 100;
static_assert(kAddressBytes == 2 * sizeof(uint32_t));

void memory_fields(auto& io, auto& m) {
  io(m.staging);
  io(m.staging_bytes);
  io(m.signals);
  io(m.copy);
  io(m.records);
  io(m.device);
  io(m.device_bytes);
}

// Without the keys of device memory.
void rail_fields(auto& io, auto& rail) {
  io.text(rail.info.device, kMaxName);
  io(rail.info.port);
  io(rail.info.ethernet);
  io(rail.info.needs_route);
  io(rail.info.mtu_code);
  io.template as<uint8_t>(rail.info.gid.kind);
  io(rail.info.lid);
  io(rail.info.gbit);
  io.object(rail.info.gid.gid.raw);
  io(rail.keys.staging);
  io(rail.keys.signals);
  io(rail.keys.copy);
  io(rail.keys.records);
}

}  // namespace

PeerMemory Offer::memory_for(uint32_t rank) const {
  PeerMemory m = memory;
  m.signals += rank * kSigsPerPeer * sizeof(SignalLine);
  m.copy += rank * sizeof(PeerCopy);
  if (m.records != 0) m.records += rank * kPutRecords * sizeof(PutRecord);
  return m;
}

std::vector<std::byte> write_offer(const Offer& offer) {
  Writer out;
  out.u16(kVersion);
  out.u16(static_cast<uint16_t>(offer.n_queues));
  out.u8(offer.ordered ? 1 : 0);
  out.u32(sizeof(PeerCopy));
  memory_fields(out, offer.memory);
  out.string(offer.presence);
  out.u8(static_cast<uint8_t>(offer.rails.size()));
  for (const OfferedRail& r : offer.rails) {
    rail_fields(out, r);
    for (const uint32_t key : r.keys.device) out.u32(key);
  }
  return out.take();
}

std::vector<std::byte> write_row(std::span<const QueueAddress> queues) {
  Writer out;
  for (const QueueAddress& q : queues) {
    out.u32(q.number);
    out.u32(q.first_packet);
  }
  return out.take();
}

Result<Offer> read_offer(std::span<const std::byte> bytes, uint32_t from) {
  const Status unreadable =
      error(moecclRemoteError,
            "rank {} sent an offer of RDMA connections that this MoECCL cannot read: do all ranks run "
            "the same MoECCL?",
            from);
  Reader in(bytes);
  Offer o;
  if (in.u16() != kVersion) return unreadable;
  o.n_queues = in.u16();
  o.ordered = in.u8() == 1;
  if (in.u32() != sizeof(PeerCopy)) return unreadable;
  memory_fields(in, o.memory);
  o.presence = in.string(kMaxAddress);
  const uint64_t n_pieces = o.memory.device_bytes / kDevicePiece + (o.memory.device_bytes % kDevicePiece != 0 ? 1 : 0);
  if (n_pieces > kMaxDevicePieces) return unreadable;
  const size_t n_rails = in.u8();
  if (o.n_queues < 1 || o.n_queues > kMaxQueuePairs || n_rails < 1 || n_rails > kMaxRails) return unreadable;
  for (size_t i = 0; i < n_rails; ++i) {
    OfferedRail r;
    rail_fields(in, r);
    r.info.mtu_code = std::clamp<uint8_t>(r.info.mtu_code, 1, 5);
    r.info.gid.kind = std::min(r.info.gid.kind, GidKind::kRoceV2);
    for (uint64_t p = 0; p < n_pieces; ++p) r.keys.device.push_back(in.u32());
    o.rails.push_back(std::move(r));
  }
  const size_t n = in.left() == 0 ? 0 : n_rails * o.n_queues;
  if (!in.ok() || in.left() != n * kAddressBytes) return unreadable;
  for (size_t i = 0; i < n; ++i) {
    const uint32_t number = in.u32(), first = in.u32();
    if (number > 0xffffff || first > 0xffffff) return unreadable;
    o.queues.push_back({number, first});
  }
  if (!in.done()) return unreadable;
  return o;
}

}  // namespace moeccl::transport::verbs
