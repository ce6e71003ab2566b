// SPDX-License-Identifier: Apache-2.0
// What host and device share of the persistent kernel: a rank's program as flat records, its header, which peers write
// flags into, and what one launch needs beside them. A program holds no pointers and no counts: one serves all buffers,
// and a launch that a CUDA graph replays finds its numbers in the header, where every operation leaves them.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/walk_net_args.h"

namespace moeccl::cuda {

inline constexpr uint32_t kWalkMostLanes = 7;  // as many barriers, and one of the whole grid
inline constexpr uint32_t kWalkSigs = 8;       // plan::kMaxSigs
inline constexpr uint32_t kWalkEntries = 4;

enum class WalkKind : uint8_t { kSignal, kWait, kCopy, kReduce, kRows, kRowSums };
enum class WalkWhen : uint8_t { kEvery, kFirst, kLast };        // plan::When
enum class WalkBuffer : uint8_t { kInput, kOutput, kStaging };  // plan::Buffer
inline constexpr uint8_t kWalkBarrier =
    1;                                    // earlier steps of the lane touch the same memory: all its blocks meet before
inline constexpr uint8_t kWalkFinal = 2;  // the divisor of Avg applies

// A plan::Ref.
struct WalkRef {
  uint32_t rank;
  uint16_t index, part, parts;
  uint8_t buffer, padding;
};
// A plan::Step. `run`: how many signals (or waits) of the same `when` stand here in a row; threads take one each.
// `ordinal` of kRows and kRowSums: the number of the list.
struct WalkStep {
  uint8_t kind, when, sig, flags;
  uint16_t lag, run;
  uint32_t peer, ordinal, per_chunk;
  WalkRef dst;
  uint32_t first_src, n_srcs, divisor;
};
struct WalkLane {
  uint32_t first, count;
};
// A plan's SigTotal; slot = peer * kWalkSigs + sig.
struct WalkTotal {
  uint32_t slot, sent, awaited, once;
};

// What a rank says when it enters an operation. `seq` is stored last (release) and read first (acquire).
struct WalkEntry {
  uint64_t seq, history, signature, count, plan, input, output;
  uint64_t largest;  // AllToAllv: the most elements of a block that the rank sends or receives
};
// In each rank's device memory, zero at first; the staging follows it. After it come done[n_ranks], word[n_ranks *
// kWalkSigs] (peers store both), sent and awaited [n_ranks * kWalkSigs] (the rank's own).
struct WalkHeader {
  uint64_t seq, history;  // operations that have run here, and the hash of all of them
  uint32_t failed;        // stays: later launches end at once
  uint32_t left;          // blocks that are through
  uint32_t barrier[kWalkMostLanes + 1];
  uint32_t n_chunks;  // AllToAllv: of this operation, from its first block to the others
  uint32_t padding;
  WalkEntry entries[kWalkEntries];  // operation k is at k % kWalkEntries
};
inline constexpr size_t walk_header_bytes(size_t n_ranks) {
  const size_t bytes = sizeof(WalkHeader) + n_ranks * (8 + kWalkSigs * 16);
  return (bytes + 255) / 256 * 256;
}

// AllToAllv: what a rank exchanges with a peer, in elements. [kWalkEntries][n_ranks] in each rank's memory.
struct WalkSplit {
  uint64_t sends, send_at, expects;
};

// Of each rank, as this rank's device reaches it.
struct WalkPeer {
  WalkHeader* header;
  uint8_t* staging;
  WalkSplit* splits;
};

// Ranks on other hosts. Their WalkPeer: `header` and `splits` are copies of what they say, in page-locked memory, and
// `staging` is this `staging`, whose layout theirs has: only the offset in it is used.
inline constexpr uint32_t kNetQueues = kWalkMostLanes + 1;  // one a lane; the last is the operation's own
using WalkNetState = WalkNetCounts<kNetQueues>;
struct WalkNet {
  WalkNetState* state;  // null: there are none
  WalkQueue* queues;    // [kNetQueues]
  uint8_t* cells;       // [kNetQueues][kNetCells] of cell_bytes
  WalkArrivals* arrivals;
  const uint8_t* staging;
  uint32_t cell_bytes, padding;
};

// kSplits: AllToAllv; in the report `expected` is what this rank gives, `seen` what the peer does, `step` 0 where this
// rank sends. kNoTables: the routing's last update failed; where that was on the device, `step` is the TableFault,
// `expected` its rank and `chunk` its value.
enum class WalkFailure : uint64_t { kNone, kDeadline, kStopped, kMismatch, kSplits, kNoTables };
inline constexpr uint64_t kWalkStop = 1, kWalkExpire = 2;  // the deadline has passed on the host
// In page-locked host memory. `kind` is stored last (release); the host reads it first (acquire).
struct WalkReport {
  uint64_t kind;
  uint64_t stop;  // the host sets it to one of kWalk...: whoever waits gives up
  uint64_t lane, step, chunk, peer, expected, seen, seq;
  WalkEntry own, entry;  // this rank's, and the peer's when it has entered the same operation
};

struct WalkArgs {
  // The program, on the device or still in page-locked host memory: read once into shared memory when it fits.
  const WalkLane* lanes;
  const WalkStep* steps;
  const WalkRef* refs;
  const WalkTotal* totals;
  uint32_t n_lanes, n_steps, n_refs, n_totals;
  WalkHeader* header;
  const WalkPeer* peers;
  WalkNet net;
  WalkReport* report;
  uint64_t* completed;  // on the rank's board; gets `number`. Null in a graph
  uint64_t number;
  uint32_t rank, n_ranks;
  uint64_t signature, count, plan;  // as exec::pack() has it; what all ranks must agree on
  const void* input;
  void* output;
  uint64_t chunk, slot_elements, half_bytes, timeout_ns;
  uint32_t n_chunks, depth, n_slots, element_bytes;
  uint32_t op, divisor, scaled;
  ScalarBits scale, unit;
  const void* scale_at;  // one element in device memory, in the place of `scale`; null: `scale` holds
};

}  // namespace moeccl::cuda
