// SPDX-License-Identifier: Apache-2.0
// A link to a rank on another host through a net plugin: in each direction one comm for frames and one for each rail,
// receives posted ahead, and a copy of the peer's board.
//
// Small puts, signals and the board travel as frames into a ring of posted buffers. A large put is copied piece by
// piece into registered memory; a frame announces each piece, so that the peer posts its receive directly into the
// staging. Signals wait at the receiver until the pieces before them are there. Nothing here grows, however slow the
// peer is.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "src/driver/memory.h"
#include "transport/common/board_wire.h"
#include "transport/common/ordered_link.h"
#include "transport/netplugin/comm_queue.h"
#include "transport/netplugin/wire.h"
#include "transport/transport.h"

namespace moeccl::transport::netplugin {

class PluginEngine;

// Comms that are connected and proved: frames first, then rails. The link's close() closes them.
struct PeerComms {
  uint32_t rank = 0;
  std::string where;     // "Fake eth0", for messages
  std::string presence;  // "10.0.0.2:4711", see transport/common/presence.h; empty: none
  struct Pair {
    Comm out = nullptr, in = nullptr;
    double weight = 1;  // bytes go to rails in proportion to it
  };
  std::vector<Pair> pairs;
};

class PluginLink final : public OrderedLink {
 public:
  // memory_type: abi::kPtr* of the staging.
  PluginLink(const LocalMemory& own, PeerComms peer, int memory_type, PluginEngine& engine);

  const char* name() const override { return name_.c_str(); }  // "plugin FastSocket"
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  // The peer's engine answers within kAnswer_ns as long as its process runs.
  int64_t unacknowledged_ms() override;
  std::string why_silent() override;

 private:
  friend class PluginEngine;
  static_assert(kBuffers <= CommQueue::kDepth);
  static constexpr uint32_t kOpenPuts = 8;   // of different lanes
  static constexpr uint32_t kAwaiting = 64;  // signal frames that wait for pieces
  // After one comm has failed or the peer has left, what still comes is taken for this long: a peer that leaves closes
  // all of its comms, and a plugin wants them closed without requests under way.
  static constexpr int64_t kLastWords_ns = 1'000'000'000;

  struct Rail {
    CommQueue out, in;
    Memory pool = nullptr, staging = nullptr;
    double weight = 1;
    uint64_t sent_bytes = 0;
    uint64_t announced = 0, arrived = 0;  // pieces for this rank
  };
  struct OpenPut {
    uint64_t offset = 0;
    const std::byte* src = nullptr;
    size_t bytes = 0, assigned = 0;
  };
  struct Awaiting {
    std::array<uint64_t, kMaxRails> pieces = {};  // announced before the signals
    std::array<uint64_t, kSigsPerPeer> words = {};
    uint32_t mask = 0;
  };

  Result<PutState> put_some(uint64_t offset, const void* src, size_t bytes) override;
  // Everything below runs under the engine's lock.
  Status open();  // registers, posts the first receives
  void close();   // the comms; once
  // Instead of close(), for a peer whose process is gone: requests are under way on its comms, and a plugin that closes
  // such a comm may then serve no other one of this process, which would break the communicator of the survivors.
  void leave_open() noexcept { new driver::Mapping(std::move(buffers_)); }
  bool turn();  // returns whether anything moved
  void let_go() noexcept override { n_open_ = 0; }
  void end(const Status& why);  // takes what still comes for a while, then loses the peer
  bool assign_pieces(OpenPut& p);
  Rail* next_rail();
  void abandon_puts() { n_open_ = 0; }

  bool room(size_t bytes);  // in the message that is being written
  void append(const FrameHead& head, const void* payload);
  void flush();
  void send_message();
  void send_small();  // signals and the board, if any wait and there is room
  Status turn_sends(bool* moved);
  bool unsent() const;
  // Returns whether the peer's last frame was taken, and no request is under way.
  bool drained() const;
  void say_bye();
  void answer();  // acknowledges messages, where nothing else has done so for a while
  void ask_for_answer();
  // Returns since when the peer owes an answer; 0: it owes none, or says nothing any more.
  int64_t silent_since_ns() const { return down_ || ending_ || bye_taken_ ? 0 : unanswered_since_ns_; }
  void lose_ended_process();

  Status turn_receives(bool* moved);
  Status turn_rails(bool* moved);
  void take_answer(const MessageHead& head);
  Status parse();
  Status take_frame(const FrameHead& head, std::span<const std::byte> payload, bool* stalled);
  Status take_put(const FrameHead& head, std::span<const std::byte> payload);
  Status take_piece(const FrameHead& head, bool* stalled);
  Status take_signals(const FrameHead& head, std::span<const std::byte> payload, bool* stalled);
  Status tell_arrivals(uint64_t offset, uint64_t bytes);
  bool pieces_there(const Awaiting& a) const;
  void apply(const Awaiting& a);
  bool apply_due();

  std::string name_;
  LocalMemory own_;
  PeerComms peer_;
  PluginEngine& engine_;
  int memory_type_;
  std::unique_ptr<BoardCopy> copy_;  // the peer's, as received
  BoardNews news_;

  // Sending.
  driver::Mapping buffers_;  // kBuffers to send, then kBuffers to receive
  CommQueue out_, in_;
  Memory out_memory_ = nullptr, in_memory_ = nullptr;
  std::vector<Rail> rails_;
  uint32_t free_buffers_ = (1u << kBuffers) - 1;
  uint32_t writing_ = kBuffers;  // the buffer of the message that is being written; kBuffers: none
  size_t written_ = 0;
  uint32_t next_number_ = 0, answered_ = 0;  // this rank's messages: sent, and taken by the peer
  uint32_t wants_answer_ = 0;                // up to this number
  int64_t unanswered_since_ns_ = 0;          // 0: everything is answered
  std::array<OpenPut, kOpenPuts> open_;
  uint32_t n_open_ = 0;
  std::array<uint64_t, kSigsPerPeer> words_ = {};
  uint32_t new_words_ = 0;    // bit mask of words_ that wait
  bool board_waits_ = false;  // to be sent as soon as there is room
  bool bye_waits_ = false, seen_waits_ = false;
  bool said_last_ = false;     // a bye or a seen was written
  uint32_t n_empty_last_ = 0;  // empty messages that must still follow it

  // Receiving.
  uint32_t reading_ = kBuffers;  // the buffer of the message that is being read; kBuffers: none
  size_t read_ = 0, read_end_ = 0;
  bool stalled_ = false;  // the next frame waits for pieces
  uint32_t expected_number_ = 0;
  bool owes_answer_ = false;
  int64_t owed_since_ns_ = 0;
  std::array<Awaiting, kAwaiting> awaiting_;
  uint32_t first_awaiting_ = 0, n_awaiting_ = 0;

  bool bye_said_ = false, bye_seen_ = false;  // by this rank, by the peer
  bool bye_taken_ = false;                    // the peer's was taken: it says nothing any more
  bool ending_ = false, in_ended_ = false, closed_ = false;
  bool gone_ = false;  // the peer's process
  int64_t end_by_ns_ = 0;
  Status why_;
};

}  // namespace moeccl::transport::netplugin
