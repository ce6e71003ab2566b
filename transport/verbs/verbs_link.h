// SPDX-License-Identifier: Apache-2.0
// A link to a rank on another host over reliable queue pairs: one lane for each queue pair of each rail. Puts are RDMA
// writes into the peer's staging, signals 8-byte writes into its lines.
//
// Puts from registered memory go without a copy, and are done when the NIC has read them. Other puts, and small ones,
// are copied to registered memory and done at once. Several puts may be open at a time; their arguments tell them
// apart.
//
// A signal must come after all puts before it, and after the board's words of its time. One queue pair of an ordered
// network guarantees that by itself. Otherwise a word waits until what it covers has completed on every lane but the
// one that carries it (on an unordered network: on every lane). Words are state, not a queue: a newer word replaces one
// that waits, so nothing here grows.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/device_order.h"
#include "src/driver/memory.h"
#include "transport/common/board_wire.h"
#include "transport/common/ordered_link.h"
#include "transport/transport.h"
#include "transport/verbs/bounce_ring.h"
#include "transport/verbs/device_regions.h"
#include "transport/verbs/peer_memory.h"
#include "transport/verbs/queue_pair.h"
#include "transport/verbs/regions.h"

namespace moeccl::transport::verbs {

class VerbsEngine;

struct Lane {
  std::unique_ptr<QueuePair> pair;
  uint32_t rail = 0;
  double weight = 1;  // the rate of its rail
  PeerKeys keys;
};

struct LinkSetting {
  LocalMemory own;
  const Region* own_staging = nullptr;
  const DeviceRegions* device = nullptr;  // null: puts come from host memory
  FarEnd far;
  PeerMemory peer;
  bool ordered = true;
  size_t copy_bytes = 0;               // puts up to this size are copied
  PeerCopy* copy = nullptr;            // of the peer's words, at this rank
  const PutRecord* records = nullptr;  // of the peer's puts; null: not wanted
  std::byte* ring = nullptr;
  size_t ring_bytes = 0;
  const Region* rings = nullptr;  // holds the ring
  // Holds the copies, rings and records of all links. Links may be read after the engine has ended, so the memory lives
  // as long as its last user.
  std::shared_ptr<driver::Mapping> memory;
};

class VerbsLink final : public OrderedLink, private Rooms, private PostedPuts, private OneSidedArrivals {
 public:
  VerbsLink(LinkSetting setting, std::vector<Lane> lanes, VerbsEngine& engine);
  ~VerbsLink() override;

  const char* name() const override { return "verbs"; }
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  int64_t unacknowledged_ms() override;
  std::string why_silent() override;

 private:
  friend class VerbsEngine;

  // Words that are written after what they announce, in this order.
  enum Word : uint32_t {
    kSeq0 = 0,
    kCompleted = kSeq0 + kEntries,
    kHealth,
    kPuts,
    kSignal0,
    kWords = kSignal0 + kSigsPerPeer
  };
  using Marks = std::array<uint64_t, kMaxLanes>;  // number of the last request on each lane
  struct OpenPut {
    uint64_t offset = 0;
    const std::byte* src = nullptr;
    size_t bytes = 0, posted = 0;  // bytes 0: free
    enum class From : uint8_t { kRoom, kRegistered, kCopied } from = From::kCopied;
    bool recorded = false;   // the peer has been told of it, if it wants to be
    bool left = false;       // post() has reported that all is under way: only taken() asks for its end
    uint64_t number = 0;     // its number among posted puts; 0: not one of them
    bool abandoned = false;  // no caller repeats it any more; the NICs may still read it
    Marks until = {};
    std::vector<Region*> held;
  };

  std::byte* room(size_t bytes) override;
  size_t most() const override { return ring_.bytes() / 2; }
  Result<PutState> put_some(uint64_t offset, const void* src, size_t bytes) override {
    return post_some(offset, src, bytes, false);
  }
  Result<PutState> post(uint64_t offset, const void* src, size_t bytes) override {
    return counted(post_some(offset, src, bytes, true));
  }
  uint64_t posted() const override { return n_posted_; }
  bool taken(uint64_t count) const override;
  bool reads_sources() const override;
  void withdraw() override;
  Status catch_up() override;
  Status read_records();

  // Everything below runs under the engine's lock.
  void let_go() noexcept override;
  bool peer_is(RankState state) const { return load_from_device(board().health.state) == static_cast<uint32_t>(state); }
  bool failed_here() const { return s_.own.board->health.state.load(std::memory_order_relaxed) != 0; }
  Result<PutState> post_some(uint64_t offset, const void* src, size_t bytes, bool stays);
  void close_left();  // closes posted puts whose sources have been read
  OpenPut* open(uint64_t offset, const std::byte* src, size_t bytes);
  bool post_pieces(OpenPut& p);  // returns whether anything moved
  size_t post_piece(OpenPut& p, Lane& lane, size_t wanted);
  bool finish(OpenPut& p);        // returns whether the source may be reused, and closes the put if so
  bool record(const OpenPut& p);  // false while there is no room
  Lane* next_lane();
  uint32_t index_of(const Lane& lane) const { return static_cast<uint32_t>(&lane - lanes_.data()); }
  bool reached(const Marks& marks) const;
  void reclaim();
  std::byte* take_room(size_t bytes);  // of the ring; null while it is full: then a completion is asked for
  void ask_for_room();
  void ask_for(Lane& lane, uint64_t number);
  void flush();  // posts what the lanes have collected
  void abandon_puts();

  void set_word(Word w, uint64_t value);
  void send_words();
  Lane* lane_for(const Marks& marks, uint32_t slots);
  QueuePair::Target target_of(Word w, const Lane& lane) const;
  QueuePair::Target place(uint64_t at, const Lane& lane, size_t* bytes) const;
  bool from_device(const void* src, size_t bytes) const {
    return s_.device != nullptr && s_.device->source(src, &bytes) != nullptr;
  }
  void tell_board();
  QueuePair::Target in_copy(uint64_t at, const Lane& lane) const { return {s_.peer.copy + at, lane.keys.copy}; }
  void write_all(Lane& lane, QueuePair::Target to, const std::byte* from, size_t bytes);
  void keep_alive();
  bool waits() const { return !down_ && (pending_ != 0 || board_waits_); }
  bool idle() const;
  void drain();  // asks for the completion of everything under way
  void completed(uint32_t lane, uint64_t tag, int64_t now_ns);
  void note_asked();
  void release_all();  // queue pairs, regions: before the rails end

  LinkSetting s_;
  std::vector<Lane> lanes_;
  VerbsEngine& engine_;
  BounceRing ring_;
  std::array<OpenPut, 32> puts_;
  uint32_t reserve_ = 0;   // slots of a lane that puts leave free for words
  size_t next_asked_ = 0;  // the lane of the next sign of life

  std::array<uint64_t, kWords> words_ = {};
  std::array<Marks, kWords> marks_ = {};
  uint32_t pending_ = 0;                     // bit mask of words_
  std::array<Marks, kEntries> bodies_ = {};  // the last write of each entry's body, and of its blocks
  Told told_;                                // of this rank's board
  std::array<std::array<uint64_t, 3>, 2> told_blocks_ = {};
  uint64_t n_records_ = 0;      // of this rank's puts
  uint64_t records_taken_ = 0;  // of the peer's
  bool board_waits_ = false;
  uint64_t n_posted_ = 0;
  std::atomic<uint64_t> n_taken_{0};  // of them; all before it, too
  bool queued_ = false;               // in the engine's list
  int64_t asked_since_ns_ = 0;        // when the oldest missing completion was asked for, or the last one came
};

}  // namespace moeccl::transport::verbs
