// SPDX-License-Identifier: Apache-2.0
// What a rank tells the others before they connect, and in a row for each of them. Everything is checked when it is
// read.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "src/base/wire.h"
#include "transport/verbs/peer_memory.h"
#include "transport/verbs/queue_pair.h"

namespace moeccl::transport::verbs {

struct OfferedRail {
  RailInfo info;
  PeerKeys keys;
};

inline constexpr size_t kAddressBytes = 8;  // of a queue pair, in a row

struct Offer {
  uint32_t n_queues = 1;  // to each peer on each rail
  bool ordered = true;
  std::vector<OfferedRail> rails;    // at most kMaxRails
  PeerMemory memory;                 // of peer 0; see memory_for()
  std::string presence;              // Presence::address()
  std::vector<QueueAddress> queues;  // [rails][n_queues] of the reader's row; empty on the same host

  PeerMemory memory_for(uint32_t rank) const;
  QueueAddress queue(size_t rail, uint32_t queue) const { return queues[rail * n_queues + queue]; }
};

std::vector<std::byte> write_offer(const Offer& offer);  // without the queues
std::vector<std::byte> write_row(std::span<const QueueAddress> queues);
// Reads an offer and the row that follows it. Returns RemoteError for what this MoECCL cannot read.
Result<Offer> read_offer(std::span<const std::byte> bytes, uint32_t from);

}  // namespace moeccl::transport::verbs
