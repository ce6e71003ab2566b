// SPDX-License-Identifier: Apache-2.0
// Every size that an algorithm chooses: bytes of one chunk of one block, and rotations of the staging.
#pragma once

#include <cstdint>

namespace moeccl::algo::tuning {

// Pulls and pushes that copy twice: the chunk is written, then others read it while it is still in the cache. The
// chunks of all ranks share the last-level cache.
inline constexpr uint64_t kStagedAllReduce = 512 << 10;  // of the message; each rank reduces 1/n of it
inline constexpr uint64_t kStagedReduce = 512 << 10;     // the same without the last phase
inline constexpr uint64_t kStagedAllGather = 256 << 10;  // of a rank's block
inline constexpr uint64_t kStagedBroadcast = 256 << 10;  // of the message
inline constexpr uint64_t kStagedBlocks = 256 << 10;     // of each of n blocks: AllToAll, ReduceScatter, Scatter
inline constexpr uint64_t kStagedGather = 256 << 10;     // of a rank's block

// The same where staging stays in the caches: a core's second-level cache holds the chunks of its ranks.
inline constexpr uint64_t kCachedAllReduce = 512 << 10;
inline constexpr uint64_t kCachedAllGather = 256 << 10;
inline constexpr uint64_t kCachedBlocks = 256 << 10;

// One copy only: chunks limit what a reduction keeps in L2 between its reads and its writes. An AllReduce stores its
// result everywhere at once and keeps nothing, so long runs of each buffer suit the memory.
inline constexpr uint64_t kDirectAllReduce = 4 << 20;  // of the message
inline constexpr uint64_t kDirectReduce = 512 << 10;
inline constexpr uint64_t kDirectAllGather = 256 << 10;  // of a rank's block, read once for n writes
inline constexpr uint64_t kDirectAllToAll = 1 << 20;     // of each block; in place it is also the staging slot

// Puts into peers' staging. These are larger than the staged ones: on a network the chunk must outweigh the latency of
// a step.
inline constexpr uint64_t kRingAllReduce = 1 << 20;     // of the message; 1/n of it moves at a step
inline constexpr uint64_t kRingBlocks = 128 << 10;      // of a rank's block
inline constexpr uint64_t kChainBroadcast = 128 << 10;  // of the message: the pipeline's grain
inline constexpr uint64_t kTree = 128 << 10;
inline constexpr uint64_t kDoubling = 256 << 10;
inline constexpr uint64_t kFlatBlocks = 64 << 10;  // of each of n blocks
inline constexpr uint64_t kFlatBlocksFar = 1
                                           << 20;  // the same between hosts: two chunks fill a 1 Gbit/s line for 16 ms
inline constexpr uint64_t kFlatAllReduce = 512 << 10;  // of the message
inline constexpr uint64_t kHierAllReduce = 1 << 20;    // of the message, or more:
inline constexpr uint64_t kHierPart = 4 << 10;         // of a part of it, which one rank finishes
inline constexpr uint64_t kHierBlocks = 128 << 10;     // of a rank's block

// How much longer chunks without staging are where every step starts a kernel on a device. A launch takes some 2 us, in
// which an NVLink port moves 1 MiB.
inline constexpr uint64_t kCoarse = 16;

// Asking whether all buffers can be reached costs one more synchronisation; from this size of the larger buffer on, it
// may save more than that (docs/decisions.md).
inline constexpr uint64_t kAskReach = 256 << 10;
// AllToAllv is asked at any size. A rank that neither sends nor receives this much answers no: copying twice after one
// meeting then takes less time than copying once between two (decision 109).
inline constexpr uint64_t kReachAllToAllv = 48 << 10;

// Replicated experts: staging of all ranks in flight together; the least chunk of an expert; its chunk without staging.
inline constexpr uint64_t kExpertReduce = 96 << 20;
inline constexpr uint64_t kExpertLeast = 64 << 10;
inline constexpr uint64_t kExpertDirect = 256 << 10;
inline constexpr uint64_t kExpertMove = 256 << 10;  // of what one rank sends to another

// MoNTA's figures are for 4 chunks; where a profile is available, the chunk solver gives the number.
inline constexpr uint32_t kTensorChunks = 4;

// Rotations. With two, a rank fills one while peers read the other: a signal of chunk c+1 then says that chunk c is
// free.
inline constexpr uint32_t kOverlap = 2;
// Where data flows one way only, a credit comes back after this many chunks, so that ranks seldom wait for it.
inline constexpr uint32_t kOneWay = 4;
// On a long line (plan/long_line.h): more chunks under way waste less of the staging on the one that is being filled.
// A paced line keeps the times of no more signals (transport::kVisibleRing).
inline constexpr uint32_t kFar = 6;
// All rotations but one cover the round trip and the time that ranks take to copy and to wake up.
inline constexpr double kFarLoop = 1.5;  // round trips

}  // namespace moeccl::algo::tuning
