// SPDX-License-Identifier: Apache-2.0
// What host and device share for the persistent kernel: a rank's program as flat records, its header, which peers write
// flags into, and the other arguments of a launch. A program holds no pointers and no counts, so one program serves all
// buffers. A launch that a CUDA graph replays finds its numbers in the header, where every operation leaves them.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/walk_net_args.h"

#if defined(__CUDACC__)
#define MOECCL_BOTH __host__ __device__
#else
#define MOECCL_BOTH
#endif

namespace moeccl::cuda {

inline constexpr uint32_t kWalkMostLanes = 7;  // one barrier each, and one for the whole grid
inline constexpr uint32_t kWalkSigs = 8;       // plan::kMaxSigs
inline constexpr uint32_t kWalkEntries = 4;

enum class WalkKind : uint8_t { kSignal, kWait, kCopy, kReduce, kRows, kRowSums };
enum class WalkWhen : uint8_t { kEvery, kFirst, kLast };        // plan::When
enum class WalkBuffer : uint8_t { kInput, kOutput, kStaging };  // plan::Buffer
inline constexpr uint8_t kWalkBarrier = 1;  // all blocks of the lane meet first: earlier steps touch the same memory
inline constexpr uint8_t kWalkFinal = 2;    // the divisor of Avg applies

// A plan::Ref.
struct WalkRef {
  uint32_t rank;
  uint16_t index, part, parts;
  uint8_t buffer, padding;
};
// A plan::Step. `run` is how many signals (or waits) of the same `when` follow here in a row; threads take one each.
// `ordinal` of kRows and kRowSums is the number of the list.
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
// A plan's SigTotal, with slot = peer * kWalkSigs + sig.
struct WalkTotal {
  uint32_t slot, sent, awaited, once;
};

// What a rank publishes when it enters an operation. `seq` is stored last (release) and read first (acquire).
struct WalkEntry {
  uint64_t seq, history, signature, count, plan, input, output;
  uint64_t largest;  // AllToAllv: the most elements of a block that the rank sends or receives
};
// For the launches that the host numbers, or for those that graphs replay. A stream or an event orders the launches of
// each kind, so one turn of each suffices.
struct WalkTurn {
  uint32_t verdict;  // whether the launch may run, from its block 0 to the others; one of kWalk... below, or 0
  uint32_t left;     // blocks of a refused launch that have finished
};
inline constexpr uint32_t kWalkRuns = 1, kWalkRefused = 2;
// In each rank's device memory, initially zero; the staging follows it. The header is followed by done[n_ranks] and
// word[n_ranks * kWalkSigs] (peers store both), and sent and awaited [n_ranks * kWalkSigs] (the rank's own).
struct WalkHeader {
  uint64_t seq, history;  // the number of operations that have run here, and the hash of all of them
  uint32_t failed;        // sticky: later launches end at once
  uint32_t left;          // blocks that have finished
  uint32_t barrier[kWalkMostLanes + 1];
  uint32_t n_chunks;  // AllToAllv: of this operation, passed from its first block to the others
  uint32_t running;   // launches that have begun and not ended; more than one: the program has not ordered them
  WalkTurn turns[2];  // of launches with a number, and of replays
  uint64_t began_ns;  // when this operation's kernel started, on device_ns()
  WalkEntry entries[kWalkEntries];  // operation k uses k % kWalkEntries
};
inline constexpr size_t walk_header_bytes(size_t n_ranks) {
  const size_t bytes = sizeof(WalkHeader) + n_ranks * (8 + kWalkSigs * 16);
  return (bytes + 255) / 256 * 256;
}

// AllToAllv: what a rank exchanges with one peer, in elements. Each rank's memory has [kWalkEntries][n_ranks].
struct WalkSplit {
  uint64_t sends, send_at, expects;
};

// One rank's memory, as this rank's device reaches it.
struct WalkPeer {
  WalkHeader* header;
  uint8_t* staging;
  WalkSplit* splits;
};

// Ranks on other hosts. In their WalkPeer, `header` and `splits` are copies of what they announced, in page-locked
// memory. `staging` is this rank's `staging`, which has the same layout: only the offset in it is used.
inline constexpr uint32_t kNetQueues = kWalkMostLanes + 1;  // one for each lane; the last is for the operation itself
using WalkNetState = WalkNetCounts<kNetQueues>;
struct WalkNet {
  WalkNetState* state;  // null: no ranks on other hosts
  WalkQueue* queues;    // [kNetQueues]
  uint8_t* cells;       // [kNetQueues][kNetCells] of cell_bytes
  WalkArrivals* arrivals;
  const uint8_t* staging;
  uint32_t cell_bytes, padding;
};

// kSplits is for AllToAllv: in the report, `expected` is this rank's value, `seen` the peer's, and `step` is 0 if this
// rank sends. kNoTables: the routing's last update failed. If that was on the device, `step` is the TableFault,
// `expected` its rank and `chunk` its value.
// kBeside: another launch of this rank was running.
// kMessage...: of messages_args.h.
enum class WalkFailure : uint64_t {
  kNone,
  kDeadline,
  kStopped,
  kMismatch,
  kSplits,
  kNoTables,
  kBeside,
  kMessageLate,
  kMessageStopped,
  kMessageSize,
  kMessageType
};
inline constexpr uint64_t kWalkStop = 1;
// The deadline of the launch with this number has passed on the host.
MOECCL_BOTH constexpr uint64_t walk_expired(uint64_t number, bool messages) {
  return number << 2 | (messages ? 3u : 2u);
}
// In page-locked host memory. `kind` is stored last (release); the host reads it first (acquire).
struct WalkReport {
  uint64_t kind;
  // The host sets it to kWalkStop, and every wait gives up, or to walk_expired(), and those of one launch do.
  uint64_t stop;
  uint64_t begun;  // the number of the newest operation that has begun
  uint64_t lane, step, chunk, peer, expected, seen, seq;
  WalkEntry own, entry;  // this rank's, and the peer's when it has entered the same operation
};

struct WalkArgs {
  // The program, in device or page-locked host memory. It is read once into shared memory when it fits.
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
  uint64_t* took_ns;  // gets how long this kernel ran, before `completed`; may be null
  uint32_t rank, n_ranks;
  uint64_t signature, count, plan;  // as exec::pack() returns them; all ranks must agree on these
  const void* input;
  void* output;
  uint64_t chunk, slot_elements, part_slot_elements, half_bytes, timeout_ns;
  uint32_t n_chunks, depth, n_slots, n_part_slots, element_bytes;
  uint32_t op, divisor, scaled;
  ScalarBits scale, unit;
  const void* scale_at;  // one element in device memory that replaces `scale`; null: use `scale`
};

}  // namespace moeccl::cuda
