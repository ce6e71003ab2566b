// SPDX-License-Identifier: Apache-2.0
// One rank's end towards one peer: one-sided puts into the peer's staging, signals, and the peer's own words. What only
// some transports can do is a part of the link, which is null where the link has none.
//
// A link never allocates on the path of an operation and never waits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "src/base/status.h"
#include "transport/words.h"

namespace moeccl::transport {

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

// What of a peer's memory this rank reaches with loads and stores. Null or 0: it does not.
struct PeerView {
  std::byte* staging = nullptr;   // by whatever runs the operation, host or device
  std::byte* messages = nullptr;  // base of Segment::message_offset(); the host reaches it
  std::byte* heap = nullptr;      // the peer's symmetric heap
  size_t heap_bytes = 0;
  bool same_process = false;         // addresses of the peer can be used as they are: threads of one process
  const Outbox* outboxes = nullptr;  // both
  SignalLine* signals = nullptr;     // the lines that signal() writes, [kSigsPerPeer]: for paced/
};

// The peer's own words, in its segment or in a copy that the transport keeps fresh.
struct PeerWords {
  const Board* board = nullptr;
  const BlockWord* blocks[2] = {};  // what it sends to this rank in an AllToAllv, by parity of the operation
};

// Copies from the peer's private memory.
class Reads {
 public:
  virtual Status read(uint64_t address, void* dst, size_t bytes) = 0;

 protected:
  ~Reads() = default;
};

// A link that copies what it puts, or must register it, offers memory of its own: what is packed there goes as it is,
// by a put() from there that follows at once and is done at once.
class Rooms {
 public:
  // Null while it is full.
  virtual std::byte* room(size_t bytes) = 0;
  // Larger rooms are never given.
  virtual size_t most() const = 0;

 protected:
  ~Rooms() = default;
};

// A network that takes bytes from where they lie, later: RDMA from registered memory. put() waits for that; whoever can
// leave the source alone meanwhile posts several puts one behind the other.
class PostedPuts {
 public:
  // As Link::put(), but done means only that all is under way, in order with signals: the source must stay as it is
  // until taken(posted()), asked right behind.
  virtual Result<PutState> post(uint64_t offset, const void* src, size_t bytes) = 0;
  virtual uint64_t posted() const = 0;  // so far
  // Whether the sources of the first `count` may be reused. True for all when the link has lost its peer.
  virtual bool taken(uint64_t count) const = 0;

 protected:
  ~PostedPuts() = default;
};

// A network that copies what arrives may as well copy it to where it is wanted.
class Landings {
 public:
  // Exactly this range of the own staging, once the peer puts it, will only be copied to `dst`.
  virtual void land(uint64_t offset, size_t bytes, std::byte* dst) = 0;
  // Ends that, and tells whether the bytes are at `dst` instead of in the staging.
  virtual bool landed(uint64_t offset) = 0;
  // From here on the link writes to no such memory any more.
  virtual void land_nothing() = 0;

 protected:
  ~Landings() = default;
};

// Lines that several operations of different classes share serve the more urgent one first, put by put.
class PutTurns {
 public:
  // Whether a put of an operation of this class may begin now; false asks the caller to come again. Once true it stays
  // so until the put is done.
  virtual bool may_put(uint32_t traffic_class, size_t bytes) = 0;

 protected:
  ~PutTurns() = default;
};

// A link whose bytes take their emulated time (paced/).
class Pace {
 public:
  // Bytes that were stored through the view.
  virtual void wrote(size_t bytes) = 0;
  // Whether what was put since the last signal may go now: an uplink that several communicators share serves the more
  // urgent class first. False asks the caller to come again, and not to signal before.
  virtual bool admit(uint32_t traffic_class) = 0;
  // When the bytes before the last signal() cross; empty where there were none.
  virtual Crossing crossing() const = 0;

 protected:
  ~Pace() = default;
};

// A link whose put() takes CUDA memory and goes through this rank's own stream (cuda_net/).
class DeviceSide {
 public:
  // As put(), from host memory.
  virtual Result<PutState> put_words(uint64_t offset, const void* src, size_t bytes) = 0;
  // After a signal of the peer was seen: what it has put before will be where kernels read it when they run that are
  // started from now on.
  virtual Status settle() = 0;
  // Whether nothing that was put or signalled waits for the stream any more.
  virtual bool sent_all() const = 0;

 protected:
  ~DeviceSide() = default;
};

// A link whose puts land without the receiver's CPU (Capabilities::one_sided) and whose receiver has an Arrivals.
class OneSidedArrivals {
 public:
  // After a signal of the peer was seen: tells Arrivals of all puts that came before it.
  virtual Status catch_up() = 0;

 protected:
  ~OneSidedArrivals() = default;
};

// One thread at a time.
class Link {
 public:
  virtual ~Link() = default;
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  virtual const char* name() const = 0;  // "thread", "shm", "paced", "tcp", ...
  const Board& board() const { return *peer_words_.board; }
  // What the peer sends to this rank, and expects of it, in the AllToAllv that is operation `seq`.
  const BlockWord& block(uint64_t seq) const { return *peer_words_.blocks[seq % 2]; }

  // Moves `bytes` to offset of the peer's staging; the data is there when a later signal() is seen. Memory takes all at
  // once; a network may be full: then the same put is called again until it is done. Meanwhile other puts to this peer
  // may find the link full, or go beside it where the transport keeps several apart by their arguments.
  virtual Result<PutState> put(uint64_t offset, const void* src, size_t bytes) = 0;
  // Makes everything before it visible, then tells the peer: signal number `number` of `sig`, with `tag`.
  virtual Status signal(uint32_t sig, uint32_t number, uint32_t tag) = 0;
  // Success, or how this link lost its peer ("process 4711 of rank 2 died").
  virtual Status check_peer() = 0;
  // Milliseconds for which the peer's host has acknowledged nothing although something was sent; 0: it does, nothing
  // was, or the link cannot tell.
  virtual int64_t unacknowledged_ms() { return 0; }

  const PeerView& view() const { return view_; }
  // The parts. They live as long as the link.
  Reads* reads() const { return parts_.reads; }
  Rooms* rooms() const { return parts_.rooms; }
  PostedPuts* posted_puts() const { return parts_.posted_puts; }
  Landings* landings() const { return parts_.landings; }
  PutTurns* put_turns() const { return parts_.put_turns; }
  Pace* pace() const { return parts_.pace; }
  DeviceSide* device() const { return parts_.device; }
  OneSidedArrivals* one_sided() const { return parts_.one_sided; }

 protected:
  struct Parts {
    Reads* reads = nullptr;
    Rooms* rooms = nullptr;
    PostedPuts* posted_puts = nullptr;
    Landings* landings = nullptr;
    PutTurns* put_turns = nullptr;
    Pace* pace = nullptr;
    DeviceSide* device = nullptr;
    OneSidedArrivals* one_sided = nullptr;
  };
  // All are filled by the constructor of the transport's class, and stay.
  PeerWords peer_words_;
  PeerView view_;
  Parts parts_;
};

}  // namespace moeccl::transport
