// SPDX-License-Identifier: Apache-2.0
// What a rank's peers write to: its staging, the lines of its signals, and a copy of each peer's own words, which the
// peer keeps up to date with one-sided writes.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "transport/words.h"

namespace moeccl::transport::verbs {

inline constexpr uint32_t kMaxRails = 8;
inline constexpr uint32_t kMaxLanes = 16;  // queue pairs to one peer, over all rails
// The most device memory that one region holds: more than 2 GiB is not mapped where there is an IOMMU.
inline constexpr uint64_t kDevicePiece = uint64_t{2} << 30;
inline constexpr uint32_t kMaxDevicePieces = 64;

// A put that a peer has made, for receivers that want to hear of puts (LocalMemory::arrivals).
struct PutRecord {
  std::atomic<uint64_t> offset, bytes;
};
// A receiver takes records when it has waited for a signal. A plan may make a put for each of thousands of blocks
// before.
inline constexpr uint32_t kPutRecords = 4096;

// One rank's words as that rank has written them here. Its 8-byte writes arrive whole; `seq` of an entry, `state` and
// `n_puts` come after what they announce.
struct PeerCopy {
  Board board;
  BlockWord blocks[2];
  alignas(kLine) std::atomic<uint64_t> n_puts;  // records so far; record number n is at n % kPutRecords
};

// The keys of one rail, which its NIC must be shown to write there.
struct PeerKeys {
  uint32_t staging = 0, signals = 0, copy = 0, records = 0;
  std::vector<uint32_t> device;  // of PeerMemory::device, by pieces of kDevicePiece
};
// Where a peer keeps what this rank writes, as addresses in the peer's process.
struct PeerMemory {
  uint64_t staging = 0, staging_bytes = 0;
  uint64_t signals = 0;                   // the lines of this rank's signals, [kSigsPerPeer]
  uint64_t copy = 0;                      // the copy of this rank's words
  uint64_t records = 0;                   // of this rank's puts, [kPutRecords]; 0: they are not wanted
  uint64_t device = 0, device_bytes = 0;  // puts to the first device_bytes of the staging go there instead
};

}  // namespace moeccl::transport::verbs
