// SPDX-License-Identifier: Apache-2.0
// The resources that a communicator gives its executors: links, own memory, counters, health and the flight recorder.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "kernels/table.h"
#include "src/base/clock.h"
#include "src/exec/flight_directory.h"
#include "src/exec/recorder.h"
#include "src/exec/shared_heap.h"
#include "transport/shm/segment.h"
#include "transport/transport.h"

namespace moeccl::exec {

inline constexpr uint32_t kMessageData = 8, kMessageCredit = 9;  // sigs of Send/Recv
static_assert(kMessageData >= plan::kMaxSigs && kMessageCredit < transport::kSigsPerPeer);

// A copy from a staging slot to Output that is the only reader of what `peer` puts there.
struct LandingStep {
  const plan::Step* copy = nullptr;
  uint32_t peer = 0;
};
struct LaneState {
  uint32_t chunk = 0, pc = 0;
  bool done = false;
};
// The places of a peer's Input and Output according to its entry; resolved at first use.
struct PeerBuffers {
  bool known = false;
  const std::byte* input = nullptr;  // reachable by loads
  std::byte* output = nullptr;
  uint64_t input_address = 0;  // otherwise, for Link::read
};

// A put whose source the link is still reading; see transport::PostedPuts.
struct PostedPut {
  size_t lane = 0;
  uint32_t peer = 0;
  uint64_t count = 0;
};

// Working memory for one Execution at a time, kept between operations.
struct Scratch {
  std::vector<LaneState> lanes;
  std::vector<PeerBuffers> peers;
  std::vector<const void*> srcs;
  std::vector<kernels::Scalar> scales;
  std::vector<void*> copies;
  std::vector<LandingStep> landings;
  std::vector<PostedPut> posted;
  std::vector<uint8_t> slot_readers;
};

// A word from this rank for all ranks, carried by the entry of one operation. Every rank reads all words when it enters
// the second operation after that one, as kEntries allows. Used by the thread that runs operations.
struct Ballot {
  static constexpr uint64_t kHeardAfter = 2;
  uint64_t at = 0;  // the operation that carries the word; 0: none
  uint64_t word = 0;
  std::function<void(std::span<const uint64_t> words)> heard;  // [n_ranks]
};

// Slots in device memory for the bytes of a pair's messages, [transport::shm::kMessageSlots]. The headers stay in the
// segment.
struct DeviceSlots {
  std::byte* out = nullptr;  // in the peer's memory, for messages from this rank
  std::byte* in = nullptr;   // in this rank's memory, for messages from the peer
  uint64_t bytes = 0;        // size of a slot; 0: there are no slots, and the bytes follow the header
};

struct Fabric {
  // Leaves the segment, links and kernels unset. `staging_bytes` is the size of this rank's staging for two operations.
  Fabric(uint32_t rank, uint32_t n_ranks, uint64_t staging_bytes);

  const uint32_t rank, n_ranks;
  std::string name;  // for messages; may be empty
  // Returns "rank 0 of 2 of communicator 28eb72c3 (name)", as `moeccl postmortem` calls it.
  std::string who() const;
  std::shared_ptr<transport::shm::Segment> own;
  std::vector<std::unique_ptr<transport::Link>> links;  // [n_ranks], null for this rank
  std::vector<const transport::Outbox*> outboxes;       // [n_ranks], two each; null where they cannot be read
  std::unique_ptr<transport::Engine> engine;            // moves the bytes of links that need it; may be null
  std::vector<uint8_t> paced;                           // [n_ranks] the link's signals carry a time
  const uint64_t half_bytes;                            // staging of one operation: halves alternate
  const kernels::KernelTable* kernels = nullptr;
  std::byte* heap = nullptr;  // this process's symmetric heap
  size_t heap_bytes = 0;
  SharedHeap* shared_heap = nullptr;  // the same heap; may be null
  int64_t timeout_ms = 0;
  std::atomic<int> priority{0};  // a moecclPriority_t, for calls that give none
  bool crowded = false;          // more ranks than cores
  // A rank's larger Outputs are written past the cache: at this size, the Outputs of all ranks of this host fill it.
  uint64_t stream_from_bytes = ~uint64_t{0};
  uint32_t spin_polls = 0;  // polls before a waiting rank looks at the clock
  int64_t spin_ns = 0;      // after which it may give up its core
  // State of the executing thread across its operations: how long it waits before it yields, and when it last made
  // room.
  struct {
    int64_t before_yield_ns = 0, made_room_ns = 0;
  } waiting;

  // For CUDA memory: staging apart from the segment's (null: in the segment), and the function that publishes an
  // operation's end, because launched work may still run when the host has nothing left to do.
  bool cuda = false;
  std::byte* staging = nullptr;
  std::function<void(uint64_t sequence)> publish_completed;
  transport::Arrivals* arrivals = nullptr;  // is told of puts over the network once it connects; may be null
  transport::DeviceMemory device_memory;    // what NICs may access themselves; then nothing is told of puts
  std::vector<DeviceSlots> device_slots;    // [n_ranks], or empty
  // [n_ranks] of a message, that one slot of a pair holds at most, the same at both ends; empty: what fits.
  std::vector<uint64_t> message_bytes;

  // Numbers of signals so far, mod 2^32; [peer * kSigsPerPeer + sig].
  std::vector<uint32_t> sent, awaited;
  // `entered`: for each peer, the newest operation that it is known to have entered, agreeing with this rank on it and
  // on all before. `finished`: where that does not tell, the newest operation that it is known to have finished.
  std::vector<uint64_t> entered, finished;
  uint64_t met = 0;  // newest operation in which this rank has heard from all ranks that it asks
  // Counts what executions stored into each peer's memory; written by the executing thread.
  struct Traffic {
    uint64_t bytes = 0, messages = 0;
    void add(uint64_t n) {
      bytes += n;
      ++messages;
    }
  };
  std::vector<Traffic> traffic;  // [n_ranks]
  uint64_t sequence = 0;         // of this rank's newest operation
  uint64_t history = 0;          // hash of all operations so far: ranks that ever called different ones differ for good
  Recorder recorder;
  Scratch execution;
  Ballot ballot;
  // The only rank with which this rank compares its history of operation k, or kAll, at k % kEntries. Peers can write
  // into the entries themselves.
  static constexpr uint32_t kAll = ~0u;
  std::array<uint32_t, transport::kEntries> compare_with = {kAll, kAll, kAll, kAll};
  std::vector<std::byte> scratch;        // packs rows for links without a view
  std::atomic<size_t> scratch_bytes{0};  // that it holds, for threads that only ask

  std::atomic<bool> aborted{false};
  std::atomic<bool> dumped{false};  // the flight recorder, because of a failure

  transport::Link& link(uint32_t peer) const { return *links[peer]; }
  DeviceSlots slots_with(uint32_t peer) const { return device_slots.empty() ? DeviceSlots{} : device_slots[peer]; }
  const transport::Outbox* outbox(uint32_t peer, uint64_t seq) const { return outboxes[peer] + seq % 2; }
  bool in_heap(const void* p) const {
    const auto* b = static_cast<const std::byte*>(p);
    if (heap == nullptr || b < heap || b >= heap + heap_bytes) return false;
    return shared_heap == nullptr || shared_heap->n_detached() == 0 || !shared_heap->is_detached(p);
  }

  // Tells the peers on which core this rank runs. Returns the core + 1, or 0 if it is unknown.
  uint32_t note_core();
  // Logs the flight recorder's newest lines as errors.
  void log_recorder() const;
  // Records a failure. The first failure stays; peers read it from this rank's board.
  void fail(const Status& status) noexcept;
  // Records the failure and always tells the peers that the communicator is revoked. An earlier failure keeps its
  // reason here, but it alone would not stop the peers.
  void revoke(const Status& why);
  Status failure() const;
  bool failed() const { return failed_.load(std::memory_order_acquire); }
  void publish_state(transport::RankState state, Code code, const std::string& text);

 private:
  mutable std::mutex failure_mutex_;
  Status failure_;
  std::atomic<bool> failed_{false};
  FlightEntry listed_;  // last, so that it is destroyed before what it points to
};

}  // namespace moeccl::exec
