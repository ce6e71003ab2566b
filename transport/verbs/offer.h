// SPDX-License-Identifier: Apache-2.0
// What a rank tells the others before they connect. Everything is checked when it is read.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "src/base/wire.h"
#include "transport/verbs/peer_memory.h"
#include "transport/verbs/queue_pair.h"

namespace moeccl::transport::verbs {

struct OfferedRail {
  RailInfo info;
  PeerKeys keys;
};

struct Offer {
  uint32_t n_queues = 1;  // to each peer on each rail
  bool ordered = true;
  std::vector<OfferedRail> rails;    // at most kMaxRails
  PeerMemory memory;                 // of peer 0; see memory_for()
  std::vector<QueueAddress> queues;  // [n_ranks][rails][n_queues]; 0 for ranks of the same host

  PeerMemory memory_for(uint32_t rank) const;
  QueueAddress queue(uint32_t rank, size_t rail, uint32_t queue) const {
    return queues[(rank * rails.size() + rail) * n_queues + queue];
  }
};

std::vector<std::byte> write_offer(const Offer& offer);
// Returns RemoteError for an offer that this MoECCL cannot read.
Result<Offer> read_offer(std::span<const std::byte> bytes, uint32_t from, uint32_t n_ranks);

}  // namespace moeccl::transport::verbs
