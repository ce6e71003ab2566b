// SPDX-License-Identifier: Apache-2.0
// One rank's end of a link to one peer: one-sided puts into the peer's staging, signals, and the peer's own words. A
// capability of only some transports is a part of the link, which is null where the link lacks it.
//
// A link never waits, and never allocates on the path of an operation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "src/base/status.h"
#include "transport/words.h"

namespace moeccl::transport {

enum class PutState : uint8_t {
  kDone,   // all of it is under way: the source may be reused
  kMoved,  // some of it went, and the link is full now: call again with the same arguments
  kFull,   // nothing went: call again likewise
};

// The time in which bytes occupy a link, on CLOCK_MONOTONIC.
struct Crossing {
  int64_t start_ns = 0, end_ns = 0;
};

// The parts of a peer's memory that this rank can access with loads and stores. Null or 0: it cannot.
struct PeerView {
  std::byte* staging = nullptr;   // accessible to whatever runs the operation, host or device
  std::byte* messages = nullptr;  // base of Segment::message_offset(); accessible to the host
  std::byte* heap = nullptr;      // the peer's symmetric heap
  size_t heap_bytes = 0;
  bool same_process = false;         // threads of one process: the peer's addresses can be used as they are
  const Outbox* outboxes = nullptr;  // both of them
  SignalLine* signals = nullptr;     // the lines that signal() writes, [kSigsPerPeer]: for paced/
};

// The peer's own words, in its segment or in a copy that the transport keeps up to date.
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

// A link that copies what it puts, or must register it, offers room in its own memory. Data packed there is sent
// without another copy, by a put() from there that must follow at once and is done at once.
class Rooms {
 public:
  // Returns null while the link has no room.
  virtual std::byte* room(size_t bytes) = 0;
  // The size of the largest room that is ever given.
  virtual size_t most() const = 0;

 protected:
  ~Rooms() = default;
};

// A network that reads the source after the call, such as RDMA from registered memory. put() is done only after that; a
// caller that can leave the sources unchanged meanwhile posts several puts in a row.
class PostedPuts {
 public:
  // Like Link::put(), but done means only that everything is under way, in order with signals: the source must stay as
  // it is until taken(posted()) is true, with posted() called right after this.
  virtual Result<PutState> post(uint64_t offset, const void* src, size_t bytes) = 0;
  virtual uint64_t posted() const = 0;  // how many so far
  // Returns whether the sources of the first `count` posted puts may be reused; always true once the link has lost its
  // peer.
  virtual bool taken(uint64_t count) const = 0;
  // Returns whether the network still reads a source, of post() or of a put() that is not done.
  virtual bool reads_sources() const = 0;
  // Takes the sources back from an operation that failed: ends the connection if they are still read. Otherwise the
  // peer could receive what their owner stores there next, and take it for the operation's data.
  virtual void withdraw() = 0;

 protected:
  ~PostedPuts() = default;
};

// A network that copies what arrives can copy it straight to its destination.
class Landings {
 public:
  // Promises that exactly this range of this rank's staging, once the peer has put it, will only be copied to `dst`.
  virtual void land(uint64_t offset, size_t bytes, std::byte* dst) = 0;
  // Withdraws that, and returns whether the bytes are at `dst` instead of in the staging. RemoteError: only a part of
  // them has come, although the peer has signalled.
  virtual Result<bool> landed(uint64_t offset) = 0;
  // From here on the link no longer writes to any such memory.
  virtual void land_nothing() = 0;

 protected:
  ~Landings() = default;
};

// Lines that several operations of different classes share serve the more urgent one first, put by put.
class PutTurns {
 public:
  // Returns whether a put of an operation of this class may begin now; if not, the caller asks again later. Once true,
  // it stays true until the put is done.
  virtual bool may_put(uint32_t traffic_class, size_t bytes) = 0;

 protected:
  ~PutTurns() = default;
};

// A link whose bytes take an emulated time (paced/).
class Pace {
 public:
  // Counts bytes that were stored through the view.
  virtual void wrote(size_t bytes) = 0;
  // Returns whether what was put since the last signal may go now: an uplink that several communicators share serves
  // the more urgent class first. If not, the caller asks again and does not signal before.
  virtual bool admit(uint32_t traffic_class) = 0;
  // Returns when the bytes before the last signal() cross; empty if there were none.
  virtual Crossing crossing() const = 0;

 protected:
  ~Pace() = default;
};

// A link whose put() takes CUDA memory and goes through this rank's own stream (cuda_net/).
class DeviceSide {
 public:
  // Like put(), but from host memory.
  virtual Result<PutState> put_words(uint64_t offset, const void* src, size_t bytes) = 0;
  // Called after a signal of the peer was seen: what the peer put before it is then in place for kernels that are
  // started from now on.
  virtual Status settle() = 0;
  // Returns true when no put or signal waits for the stream any more.
  virtual bool sent_all() const = 0;

 protected:
  ~DeviceSide() = default;
};

// A link whose puts land without the receiver's CPU (Capabilities::one_sided), when the receiver has an Arrivals.
class OneSidedArrivals {
 public:
  // Tells Arrivals of all puts that came before the peer's signals that have been seen. Costs a load if there are none.
  virtual Status catch_up() = 0;

 protected:
  ~OneSidedArrivals() = default;
};

// Used by one thread at a time.
class Link {
 public:
  virtual ~Link() = default;
  Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  virtual const char* name() const = 0;  // "thread", "shm", "paced", "tcp", ...
  const Board& board() const { return *peer_words_.board; }
  // Returns what the peer sends to this rank, and expects of it, in the AllToAllv that is operation `seq`.
  const BlockWord& block(uint64_t seq) const { return *peer_words_.blocks[seq % 2]; }

  // Moves `bytes` to `offset` of the peer's staging; the data is there when a later signal() is seen. A memory link
  // always completes at once. A network link may be full; the caller then repeats the same call until it returns kDone.
  // Meanwhile other puts to this peer may find the link full, or proceed in parallel where the transport tells them
  // apart by their arguments.
  virtual Result<PutState> put(uint64_t offset, const void* src, size_t bytes) = 0;
  // Makes everything before it visible to the peer, then delivers signal number `number` of `sig` with `tag`.
  virtual Status signal(uint32_t sig, uint32_t number, uint32_t tag) = 0;
  // Returns success, or how this link lost its peer ("process 4711 of rank 2 died").
  virtual Status check_peer() = 0;
  // Returns for how many milliseconds the peer's host has acknowledged nothing although something was sent. 0: it
  // acknowledges, nothing was sent, or the link cannot tell.
  virtual int64_t unacknowledged_ms() { return 0; }
  // Called for such a host: returns what else this end finds out about it, in a moment; empty: nothing.
  virtual std::string why_silent() { return {}; }

  const PeerView& view() const { return view_; }
  // The optional parts, which live as long as the link.
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
  // The constructor of the transport's class sets all of these, and they never change.
  PeerWords peer_words_;
  PeerView view_;
  Parts parts_;
};

}  // namespace moeccl::transport
