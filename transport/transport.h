// The transport contract: one-sided puts into a peer's staging, signals, and, where the peer's memory is directly
// reachable, a view of it. A Link never allocates after connect and never waits.
//
// What a rank publishes about itself (its Board) and the signals that it receives are plain words in memory: its own
// shared segment, or memory into which a transport deposits what arrives. Waiting is polling those words, whatever the
// transport; an Engine moves what needs moving meanwhile.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "src/base/status.h"

namespace moeccl::transport {

inline constexpr size_t kLine = 64;           // bytes that move together between cores
inline constexpr uint32_t kSigsPerPeer = 10;  // plan::kMaxSigs for operations, then two for Send/Recv
inline constexpr uint32_t kVisibleRing = 6;

// Signals from one rank on one sig. The sender alone writes it.
struct alignas(kLine) SignalLine {
  std::atomic<uint64_t> word;  // tag << 32 | how many signals were sent so far (mod 2^32); release
  std::atomic<uint64_t> reserved;
  std::atomic<int64_t>
      visible_ns[kVisibleRing];  // paced links: signal number s may be seen from this time on, at s % kVisibleRing
};
static_assert(sizeof(SignalLine) == kLine);

// What a rank says when it enters an operation; `seq` is written last (release) and read first (acquire).
struct alignas(kLine) Entry {
  std::atomic<uint64_t> seq;
  std::atomic<uint64_t> signature;  // operation, type, operator, root, flags: see exec/operation.h
  std::atomic<uint64_t> count;      // AllToAllv, whose counts are private: the word of max_block in other operations
  std::atomic<uint64_t> plan;       // hash of the plan, or of the set among which the operation still chooses
  std::atomic<uint64_t> input;      // offset in the symmetric heap when the signature's flag says so, else address
  std::atomic<uint64_t> output;
  // AllToAllv: largest block sent or received, elements. Else what the operation before took on this rank, ns (0: not
  // told), or the word of its ballot.
  std::atomic<uint64_t> max_block;
  std::atomic<uint64_t> history;  // hash of this and all earlier operations
};
static_assert(sizeof(Entry) == kLine);
inline constexpr uint32_t kEntries = 4;

// AllToAllv: what a rank sends to each rank and what it expects of it, in elements.
struct BlockWord {
  std::atomic<uint64_t> count, displacement, expects;
};

// What a rank says to all in a small operation: the data and the word that says that it is there move together.
// Operation k is in outbox k % 2. An AllToAllv's table of blocks has room beside 8 KiB of data.
inline constexpr size_t kEagerBytes = (8 << 10) - sizeof(uint64_t);
inline constexpr size_t kOutboxBytes = kEagerBytes + (1 << 10);
struct alignas(2 * kLine) Outbox {
  std::atomic<uint64_t> word;  // tag << 32 | operation (mod 2^32); release, after the data
  std::byte data[kOutboxBytes];
};

inline constexpr uint32_t kTrafficClasses = 8;  // 0: the least urgent

// One direction of an uplink that transfers take one after another (CLOCK_MONOTONIC ns, one clock for the host); see
// paced/arbiter.h. All words start as 0.
struct alignas(kLine) UplinkWords {
  std::atomic<int64_t> free_ns;                    // when all that was admitted has crossed
  std::atomic<int64_t> claim_ns[kTrafficClasses];  // until when a waiting transfer of the class counts
  std::atomic<int64_t> owed_ns[kTrafficClasses];   // of the uplink's time, to a class that was passed over
};

// A group's uplink at a paced level.
struct PaceWords {
  UplinkWords egress, ingress;
  std::atomic<uint32_t> shared;  // not 0: several communicators use it, in the order of their classes
};
inline constexpr uint32_t kPaceLevels = 8;

enum class RankState : uint32_t { kRunning = 0, kLeft = 1, kAborted = 2, kFailed = 3 };
inline constexpr size_t kFailureText = 240;

// One rank's public words. Written by it alone; peers read and never trust.
struct Board {
  struct alignas(kLine) {
    std::atomic<uint64_t> completed;  // operations that this rank has finished
    // Thread ranks use each other's buffers as they are. A rank says so before it looks whether the other still runs
    // (both sequentially consistent); the other, when it fails, first says so and then waits until nobody uses its
    // buffers.
    std::atomic<uint64_t> uses_buffers_of_operation;  // 0: none
    std::atomic<uint64_t> reads_message_of;           // rank + 1; 0: none
    // The persistent kernel: how many operations were launched, and how many have run (stored by the device, release).
    std::atomic<uint64_t> walks_called, walked;
    std::atomic<uint32_t> core;  // where the rank last ran, + 1; 0: unknown, as on other hosts
    // Of the last two operations that this rank has finished, at operation % 2: as Entry::history. 0: see there.
    std::atomic<uint64_t> histories[2];
  } progress;
  struct alignas(kLine) {
    std::atomic<uint32_t> state;  // RankState; release, after code and text
    std::atomic<uint32_t> code;
    std::atomic<uint64_t> text[kFailureText / 8];  // UTF-8, zero-padded
  } health;
  Entry entries[kEntries];  // operation k is at k % kEntries
};

// Who must hear of puts that have arrived: memory that a device uses, beside the memory that the network reaches.
class Arrivals {
 public:
  // Called when a put has arrived whole, before any signal behind it is seen; in whatever thread moves the bytes.
  // False: more than an operation puts, the peer lies.
  virtual bool arrived(uint32_t src_rank, uint64_t offset, uint64_t bytes) = 0;

 protected:
  ~Arrivals() = default;
};

// One rank's memory as far as what arrives from a network reaches it.
struct LocalMemory {
  uint32_t rank = 0;
  Board* board = nullptr;
  SignalLine* signals = nullptr;                    // [n_ranks * kSigsPerPeer]
  const BlockWord* blocks[2] = {nullptr, nullptr};  // own AllToAllv rows [n_ranks], by parity of the operation
  std::byte* staging = nullptr;                     // and message slots behind it
  uint64_t staging_bytes = 0;
  Arrivals* arrivals = nullptr;  // null: nobody must hear of puts
};

// How far a put has come.
enum class PutState : uint8_t {
  kDone,   // all is under way: the source may be reused
  kMoved,  // some of it went, the link is full now: call again with the same arguments
  kFull,   // nothing could go: the same
};

// When bytes occupy a link, CLOCK_MONOTONIC.
struct Crossing {
  int64_t start_ns = 0, end_ns = 0;
};

// This rank's end towards one peer. One thread at a time.
class Link {
 public:
  virtual ~Link() = default;
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  virtual const char* name() const = 0;  // "thread", "shm", "paced shm", ...
  // The peer's board, where its words can be read here.
  virtual const Board& board() const = 0;
  // The peer's outbox for operation `seq`, or null when it cannot be read here.
  virtual const Outbox* outbox(uint64_t seq) const = 0;
  // What the peer sends to this rank, and expects of it, in the AllToAllv that is operation `seq`.
  virtual const BlockWord& block(uint64_t seq) const = 0;
  // The peer's staging, or null when it is reached by put() alone.
  virtual std::byte* staging_view() const = 0;
  // The base of Segment::message_offset() in the peer's segment, which the host reaches.
  virtual std::byte* message_view() const { return staging_view(); }
  // The peer's symmetric heap, or null; and its size.
  virtual std::byte* heap_view() const = 0;
  virtual size_t heap_bytes() const = 0;
  // Whether addresses of the peer can be used as they are (threads of one process).
  virtual bool same_process() const = 0;
  // Whether read() works: it copies from the peer's private memory.
  virtual bool can_read() const = 0;
  virtual Status read(uint64_t address, void* dst, size_t bytes) = 0;

  // Moves `bytes` to offset of the peer's staging; the data is there when a later signal() is seen. Memory takes all at
  // once; a network may be full: then the same put is called again until it is done, and other puts to this peer find
  // the link full meanwhile.
  virtual Result<PutState> put(uint64_t offset, const void* src, size_t bytes) = 0;
  // Whether a put of an operation of this class may begin now. A network's lines serve the more urgent class first, put
  // by put: false asks the caller to come again. Once true it stays so until the put is done.
  virtual bool may_put(uint32_t traffic_class, size_t bytes) {
    (void)traffic_class, (void)bytes;
    return true;
  }
  // The same from host memory, also where `src` of put() is CUDA memory.
  virtual Result<PutState> put_words(uint64_t offset, const void* src, size_t bytes) { return put(offset, src, bytes); }
  // Links that copy what they put offer the memory that they copy to: what is packed there goes as it is, by a put()
  // from there that follows at once. room() is null while it is full.
  virtual bool makes_room() const { return false; }
  virtual std::byte* room(size_t bytes) {
    (void)bytes;
    return nullptr;
  }
  // After a signal of the peer was seen on CUDA memory: what it has put before will be where kernels read it when they
  // run that are started from now on.
  virtual Status settle() { return {}; }
  // Whether nothing that was put or signalled waits for this rank's own stream any more.
  virtual bool sent_all() const { return true; }
  // Tells the link of bytes that were stored through a view, so that counters and pace see them.
  virtual void wrote(size_t bytes) = 0;
  // Whether what was put since the last signal may go now. An uplink that several communicators share serves the more
  // urgent class first: false asks the caller to come again, and not to signal before. Always true without
  // such an uplink.
  virtual bool admit(uint32_t traffic_class) {
    (void)traffic_class;
    return true;
  }
  // Makes everything before it visible, then tells the peer: signal number `number` of `sig`, with `tag`.
  virtual Status signal(uint32_t sig, uint32_t number, uint32_t tag) = 0;
  // When the bytes before the last signal() cross; empty where there were none or nobody knows.
  virtual Crossing crossing() const { return {}; }
  // The line that signal() writes, where this rank can write it itself; else null. For paced/.
  virtual SignalLine* signal_line(uint32_t sig) = 0;
  // Success, or how this link lost its peer ("process 4711 of rank 2 died").
  virtual Status check_peer() = 0;
  // Milliseconds for which the peer's host has acknowledged nothing although something was sent; 0: it does, nothing
  // was, or the link cannot tell.
  virtual int64_t unacknowledged_ms() { return 0; }

  // A network that copies what arrives may as well copy it to where it is wanted. land() says that exactly this range
  // of the own staging, once the peer puts it, will only be copied to `dst`; landed() ends that and tells whether the
  // bytes are at `dst` instead of in the staging. After land_nothing() the link writes to no such memory any more.
  virtual void land(uint64_t, size_t, std::byte*) {}
  virtual bool landed(uint64_t) { return false; }
  virtual void land_nothing() {}
};

// What moves the bytes of those links of one rank that cannot do so alone: sockets. A rank without such links has none.
class Engine {
 public:
  static constexpr uint32_t kAnyone = ~0u;
  virtual ~Engine() = default;
  Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // A thread that drives the rank's operations says so, and calls progress() between its polls; without one the engine
  // looks after its links itself. begin() and end() may nest.
  virtual void begin() = 0;
  virtual void end() = 0;
  // Takes what has arrived and sends what waits. Never waits itself. `awaited`: the only rank that can let the caller
  // go on, so that others need not be looked at each time.
  virtual void progress(uint32_t awaited = kAnyone) = 0;
  // The rank's board has changed. Peers learn it with the next signal to them, or within milliseconds; `now`: at once.
  // Any thread.
  virtual void board_changed(bool now) = 0;
  // An operation of the class begins or ends: what it moves over lines that are shared comes before less urgent ones'.
  // Any thread; several may be under way.
  virtual void operation(uint32_t traffic_class, bool begins) = 0;
  // Whether nothing waits for this rank's own stream, or why it never will. While it does, somebody must drive the
  // engine.
  virtual Result<bool> drained() const { return true; }
};

// One operation's use of an engine, which ends with this object or before.
class EngineUse {
 public:
  EngineUse() = default;
  ~EngineUse() { end(); }
  EngineUse(const EngineUse&) = delete;
  EngineUse& operator=(const EngineUse&) = delete;
  void begin(Engine* engine, uint32_t traffic_class) {
    end();
    engine_ = engine;
    traffic_class_ = traffic_class;
    if (engine_ != nullptr) engine_->operation(traffic_class_, true);
  }
  void end() {
    if (engine_ != nullptr) engine_->operation(traffic_class_, false);
    engine_ = nullptr;
  }

 private:
  Engine* engine_ = nullptr;
  uint32_t traffic_class_ = 0;
};

}  // namespace moeccl::transport
