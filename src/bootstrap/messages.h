// SPDX-License-Identifier: Apache-2.0
// What a Session and its Root say to each other in control frames.
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
  // From a rank: its part of a round. Payload: the time it will wait, then what the round is about.
  kJoin = 1,    // ProcessIdentity::random u64, and at a meeting of survivors the ranks that are gone; answered when all
                // ranks have joined, with the survivors' numbers (survivors only) and a Peer for each
  kGather = 2,  // its blob; answered with all blobs
  kBarrier = 3,  // nothing more
  kFds = 4,      // the set of ranks that want its descriptors, which travel with the frame
  // From a rank that waits for kJoin's answer, at a meeting of survivors.
  kGone = 5,  // the ranks that are gone by now
  // From a rank: the end.
  kLeave = 8,    // nothing
  kAbandon = 9,  // a Failure
  // From the root.
  kDone = 16,    // the answer that ends a round
  kFdsOf = 17,   // rank u32, whose descriptors travel with the frame; before the kDone of the round
  kFailed = 18,  // a Failure: the group is over
};
const char* round_name(uint16_t type);

// A rank's part of a round may be this much larger than its blob.
inline constexpr size_t kMaxRequestBytes = kMaxBlobBytes + 64;
// All blobs of a round together; a root holds that much once, and each rank too.
inline constexpr size_t kMaxGatheredBytes = size_t{1} << 30;
inline constexpr size_t kMaxSentenceBytes = 2048;

std::vector<std::byte> encode_failure(const Status& failure);
// The failure that was encoded; InternalError when the bytes make no sense. Never ok().
Status decode_failure(std::span<const std::byte> bytes);

// The count u32, then each as u32; decoding leaves what follows them in `rest`.
std::vector<std::byte> encode_numbers(std::span<const uint32_t> numbers);
bool decode_numbers(std::span<const std::byte> bytes, std::vector<uint32_t>* numbers, std::span<const std::byte>* rest);

std::vector<std::byte> encode_peers(std::span<const Peer> peers);
bool decode_peers(std::span<const std::byte> bytes, size_t n_ranks, std::vector<Peer>* peers);

std::vector<std::byte> encode_blobs(std::span<const std::vector<std::byte>> blobs);
bool decode_blobs(std::span<const std::byte> bytes, size_t n_ranks, std::vector<std::vector<std::byte>>* blobs);

std::vector<std::byte> encode_ranks(const RankSet& ranks);
bool decode_ranks(std::span<const std::byte> bytes, size_t n_ranks, RankSet* ranks);

// Milliseconds until the deadline for the other side's clock; 0: never.
uint32_t wire_timeout(Deadline deadline);
Deadline deadline_of(uint32_t wire_timeout);

// "ranks 1-3, 7 and 250 more"; "rank 5".
std::string describe_ranks(std::span<const int> ascending);

}  // namespace moeccl::bootstrap
