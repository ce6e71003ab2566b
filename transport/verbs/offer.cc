// SPDX-License-Identifier: Apache-2.0
#include "transport/verbs/offer.h"

#include <algorithm>
#include <cstring>

#include "transport/verbs/settings.h"

namespace moeccl::transport::verbs {
namespace {

constexpr uint16_t kVersion = 4;
constexpr size_t kMaxName = 63;
static_assert(kAddressBytes == 2 * sizeof(uint32_t));

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
  for (const uint64_t word : {offer.memory.staging, offer.memory.staging_bytes, offer.memory.signals, offer.memory.copy,
                              offer.memory.records, offer.memory.device, offer.memory.device_bytes})
    out.u64(word);
  out.u8(static_cast<uint8_t>(offer.rails.size()));
  for (const OfferedRail& r : offer.rails) {
    out.string(r.info.device);
    for (const uint8_t byte :
         {r.info.port, static_cast<uint8_t>(r.info.ethernet ? 1 : 0), static_cast<uint8_t>(r.info.needs_route ? 1 : 0),
          r.info.mtu_code, static_cast<uint8_t>(r.info.gid.kind)})
      out.u8(byte);
    out.u16(r.info.lid);
    out.f64(r.info.gbit);
    out.raw(std::as_bytes(std::span(r.info.gid.gid.raw)));
    for (const uint32_t key : {r.keys.staging, r.keys.signals, r.keys.copy, r.keys.records}) out.u32(key);
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
  for (uint64_t* word : {&o.memory.staging, &o.memory.staging_bytes, &o.memory.signals, &o.memory.copy,
                         &o.memory.records, &o.memory.device, &o.memory.device_bytes})
    *word = in.u64();
  const uint64_t n_pieces = o.memory.device_bytes / kDevicePiece + (o.memory.device_bytes % kDevicePiece != 0 ? 1 : 0);
  if (n_pieces > kMaxDevicePieces) return unreadable;
  const size_t n_rails = in.u8();
  if (o.n_queues < 1 || o.n_queues > kMaxQueuePairs || n_rails < 1 || n_rails > kMaxRails) return unreadable;
  for (size_t i = 0; i < n_rails; ++i) {
    OfferedRail r;
    r.info.device = in.string(kMaxName);
    r.info.port = in.u8();
    r.info.ethernet = in.u8() == 1;
    r.info.needs_route = in.u8() == 1;
    r.info.mtu_code = std::clamp<uint8_t>(in.u8(), 1, 5);
    r.info.gid.kind = static_cast<GidKind>(std::min<uint8_t>(in.u8(), static_cast<uint8_t>(GidKind::kRoceV2)));
    r.info.lid = in.u16();
    r.info.gbit = in.f64();
    const auto gid = in.raw(sizeof(r.info.gid.gid.raw));
    if (!gid.empty()) std::memcpy(r.info.gid.gid.raw, gid.data(), gid.size());
    for (uint32_t* key : {&r.keys.staging, &r.keys.signals, &r.keys.copy, &r.keys.records}) *key = in.u32();
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
