// SPDX-License-Identifier: Apache-2.0
// The memory that ranks show each other, whatever moves the bytes: boards, signals, blocks, outboxes. What a rank
// publishes about itself and the signals that it receives are plain words, in its own shared segment or in memory into
// which a transport writes what arrives. Ranks wait by polling those words.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace moeccl::transport {

inline constexpr size_t kLine = 64;           // bytes that move together between cores
inline constexpr uint32_t kSigsPerPeer = 10;  // plan::kMaxSigs for operations, then two for Send/Recv
inline constexpr uint32_t kVisibleRing = 6;

// Signals from one rank on one sig. Only the sender writes it.
struct alignas(kLine) SignalLine {
  std::atomic<uint64_t> word;  // tag << 32 | number of signals sent so far (mod 2^32); release
  std::atomic<uint64_t> reserved;
  std::atomic<int64_t>
      visible_ns[kVisibleRing];  // paced links: when signal number s becomes visible, at s % kVisibleRing
};
static_assert(sizeof(SignalLine) == kLine);

// What a rank publishes when it enters an operation. `seq` is written last (release) and read first (acquire).
struct alignas(kLine) Entry {
  std::atomic<uint64_t> seq;
  std::atomic<uint64_t> signature;  // operation, type, operator, root, flags: see exec/operation.h
  std::atomic<uint64_t> count;      // AllToAllv, whose counts are private: what max_block holds in other operations
  std::atomic<uint64_t> plan;       // hash of the plan, or of the set from which the operation still chooses
  std::atomic<uint64_t> input;      // offset in the symmetric heap when the signature's flag says so, else address
  std::atomic<uint64_t> output;
  // AllToAllv: largest block sent or received, elements. Otherwise the time that the previous operation took on this
  // rank, ns (0: not told), or the word of its ballot.
  std::atomic<uint64_t> max_block;
  std::atomic<uint64_t> history;  // hash of this and all earlier operations
};
static_assert(sizeof(Entry) == kLine);
inline constexpr uint32_t kEntries = 4;

// AllToAllv: what a rank sends to each rank and what it expects of it, in elements.
struct BlockWord {
  std::atomic<uint64_t> count, displacement, expects;
};

// What a rank sends to all ranks in a small operation: the data and the word that announces it move together. Operation
// k is in outbox k % 2. There is room for an AllToAllv's table of blocks besides 8 KiB of data.
inline constexpr size_t kEagerBytes = (8 << 10) - sizeof(uint64_t);
inline constexpr size_t kOutboxBytes = kEagerBytes + (1 << 10);
struct alignas(2 * kLine) Outbox {
  std::atomic<uint64_t> word;  // tag << 32 | operation (mod 2^32); release, after the data
  std::byte data[kOutboxBytes];
};

inline constexpr uint32_t kTrafficClasses = 8;  // 0: the least urgent

// One direction of an uplink, which carries one transfer after another (CLOCK_MONOTONIC ns, one clock for the host);
// see paced/arbiter.h. All words start at 0.
struct alignas(kLine) UplinkWords {
  std::atomic<int64_t> free_ns;                    // when everything admitted has crossed
  std::atomic<int64_t> claim_ns[kTrafficClasses];  // until when a waiting transfer of the class counts
  std::atomic<int64_t> owed_ns[kTrafficClasses];   // time on the uplink that is owed to a class that was passed over
};

// A group's uplink at a paced level.
struct PaceWords {
  UplinkWords egress, ingress;
  std::atomic<uint32_t> shared;  // not 0: several communicators use it, in the order of their classes
};
inline constexpr uint32_t kPaceLevels = 8;

enum class RankState : uint32_t { kRunning = 0, kLeft = 1, kAborted = 2, kFailed = 3 };
inline constexpr size_t kFailureText = 240;

inline constexpr uint32_t kWalkTimes = 8;  // of the last operations of the persistent kernel

// One rank's public words. Only that rank writes them; peers read them but never trust them.
struct Board {
  struct alignas(kLine) {
    std::atomic<uint64_t> completed;  // operations that this rank has finished
    // Thread ranks use each other's buffers as they are. A rank announces this before it checks whether the other still
    // runs (both sequentially consistent). A failing rank first publishes that it has failed and then waits until no
    // rank uses its buffers.
    std::atomic<uint64_t> uses_buffers_of_operation;  // 0: none
    std::atomic<uint64_t> reads_message_of;           // rank + 1; 0: none
    // The persistent kernel: how many operations were launched, and how many have run (stored by the device, release).
    std::atomic<uint64_t> walks_called, walked;
    std::atomic<uint32_t> core;  // where the rank last ran, + 1; 0: unknown, as on other hosts
    // 1: no stream of this rank uses a peer's device memory any more, and what it opened by handles is closed
    // (release).
    std::atomic<uint32_t> closed;
    // Histories of the last two operations that this rank has finished, at operation % 2. 0: use Entry::history
    // instead.
    std::atomic<uint64_t> histories[2];
  } progress;
  // The nanoseconds that operation k of the persistent kernel took from the start of its kernel, at k % kWalkTimes;
  // stored by the device before `walked`.
  struct alignas(kLine) {
    std::atomic<uint64_t> ns[kWalkTimes];
  } walks;
  struct alignas(kLine) {
    std::atomic<uint32_t> state;  // RankState; release, after code and text
    std::atomic<uint32_t> code;
    std::atomic<uint64_t> text[kFailureText / 8];  // UTF-8, zero-padded
  } health;
  Entry entries[kEntries];  // operation k is at k % kEntries
};

// Receives word of puts that have arrived, for memory that a device uses besides the memory that the network writes.
class Arrivals {
 public:
  // Called when a put has arrived whole, before any later signal is seen, in whichever thread moves the bytes. Returns
  // false for more puts than an operation makes: the peer is lying.
  virtual bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) = 0;

 protected:
  ~Arrivals() = default;
};

// The parts of one rank's memory that data from a network is written to.
struct LocalMemory {
  uint32_t rank = 0;
  Board* board = nullptr;
  SignalLine* signals = nullptr;                    // [n_ranks * kSigsPerPeer]
  const BlockWord* blocks[2] = {nullptr, nullptr};  // this rank's AllToAllv rows [n_ranks], by parity of the operation
  std::byte* staging = nullptr;                     // followed by the message slots
  uint64_t staging_bytes = 0;
  Arrivals* arrivals = nullptr;  // null: puts are not reported
};

}  // namespace moeccl::transport
