// SPDX-License-Identifier: Apache-2.0
// The control frames that a Session and its Root exchange.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/base/status.h"
#include "src/base/wire.h"
#include "src/bootstrap/bootstrap.h"

namespace moeccl::bootstrap {

enum MessageType : uint16_t {
  // From a rank: its part of a round. The payload is the time that it will wait, followed by the contents below.
  kJoin = 1,    // ProcessIdentity::random u64, and at a meeting of survivors the ranks that are gone; answered when all
                // ranks have joined, with the survivors' numbers (survivors only) and a Peer for each
  kGather = 2,  // the rank's blob; answered with all blobs
  kBarrier = 3,  // no contents
  kFds = 4,      // the set of ranks that want its descriptors, which are sent with the frame
  kRows = 6,     // a blob for each rank; answered, for each rank, with its number u32 and the blob that it sent, in any
                 // order
  // From a rank that waits for the answer to kJoin at a meeting of survivors.
  kGone = 5,  // the ranks that are gone by now
  // From a rank: its last message.
  kLeave = 8,    // no contents
  kAbandon = 9,  // a Failure
  // From the root.
  kDone = 16,    // the answer that ends a round
  kFdsOf = 17,   // rank u32, whose descriptors are sent with the frame; precedes the kDone of the round
  kFailed = 18,  // a Failure: the group is over
};
const char* round_name(uint16_t type);

inline constexpr size_t kMaxRequestBytes = kMaxRowsBytes + 64;
// The limit for all blobs of a round together. The root holds them once, and so does each rank.
inline constexpr size_t kMaxGatheredBytes = size_t{1} << 30;
inline constexpr size_t kMaxSentenceBytes = 2048;

std::vector<std::byte> encode_failure(const Status& failure);
// Returns the encoded failure, or InternalError if the bytes make no sense. Never ok().
Status decode_failure(std::span<const std::byte> bytes);

// The count as u32, then each number as u32. Decoding stores the bytes that follow in `rest`.
std::vector<std::byte> encode_numbers(std::span<const uint32_t> numbers);
bool decode_numbers(std::span<const std::byte> bytes, std::vector<uint32_t>* numbers, std::span<const std::byte>* rest);

std::vector<std::byte> encode_peers(std::span<const Peer> peers);
bool decode_peers(std::span<const std::byte> bytes, size_t n_ranks, std::vector<Peer>* peers);

std::vector<std::byte> encode_blobs(std::span<const std::vector<std::byte>> blobs);
bool decode_blobs(std::span<const std::byte> bytes, size_t n_ranks, std::vector<std::vector<std::byte>>* blobs);
// The answer to kRows.
bool decode_rows(std::span<const std::byte> bytes, size_t n_ranks, std::vector<std::vector<std::byte>>* rows);

std::vector<std::byte> encode_ranks(const RankSet& ranks);
bool decode_ranks(std::span<const std::byte> bytes, size_t n_ranks, RankSet* ranks);

// Converts a deadline to milliseconds for the other side's clock; 0 means never.
uint32_t wire_timeout(Deadline deadline);
Deadline deadline_of(uint32_t wire_timeout);

// Returns text such as "ranks 1-3, 7 and 250 more" or "rank 5".
std::string describe_ranks(std::span<const int> ascending);

}  // namespace moeccl::bootstrap
