// SPDX-License-Identifier: Apache-2.0
// A link to a rank on another host: several connections, a copy of the peer's board, and what waits to be sent.
//
// Puts go directly from the caller's memory to the sockets, as far as these take them. Small puts go through a buffer,
// so that they leave in one packet with their signal. Signals and the board are state, not a queue: newer values
// overwrite what was not sent yet, so nothing here grows, however slow the peer is.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "transport/common/board_wire.h"
#include "transport/common/ordered_link.h"
#include "transport/tcp/stream.h"
#include "transport/tcp/wire.h"
#include "transport/transport.h"

namespace moeccl::transport::tcp {

class TcpEngine;

struct TcpPeer {
  uint32_t rank = 0;
  std::string where;  // "10.0.0.2:4711", for messages
  std::vector<Stream> streams;
  int64_t mbit_per_s = 0;              // of the rails that were connected, together; 0: the peer connected them
  bool may_change_congestion = false;  // MOECCL_SOCKET_CONGESTION names none
  Cipher cipher = Cipher::kNone;       // of all its streams
};

class TcpLink final : public OrderedLink, private Landings {
 public:
  TcpLink(const LocalMemory& own, TcpPeer peer, TcpEngine& engine);

  const char* name() const override { return "tcp"; }
  Status signal(uint32_t sig, uint32_t number, uint32_t tag) override;
  int64_t unacknowledged_ms() override;
  std::string why_silent() override;

 private:
  friend class TcpEngine;

  // Only where the whole range comes as one put of one connection: with several connections, puts are cut.
  void land(uint64_t offset, size_t bytes, std::byte* dst) override;
  Result<bool> landed(uint64_t offset) override;
  void land_nothing() override;
  Result<PutState> put_some(uint64_t offset, const void* src, size_t bytes) override;
  // Everything below runs under the engine's lock.
  // Ends the streams in this direction, so that the peer loses the link too.
  void let_go() noexcept override;
  void end(const Status& why);  // after reading what has come
  void send_small();            // signals and the board, if any wait and there is room
  void append_board();          // the board's changes
  void append_signals();
  bool board_is_new() const;
  void flush(size_t stream);
  void abandon_puts();          // this rank has failed: the sources no longer belong to the link
  void receive(size_t stream);  // one turn
  Status parse(size_t stream);
  Status begin_put(Stream& s, const FrameHead& head);
  Status advance_put(Stream& s, size_t bytes);  // counts bytes of it that have come
  Status take_signals(Stream& s, const FrameHead& head, std::span<const std::byte> payload, bool* stalled);
  Status take_board(const FrameHead& head, std::span<const std::byte> payload);
  bool assign_pieces(size_t* moved);
  size_t next_stream() const;
  bool wants_turn() const;  // whether it could go on without a new event
  void look_at_queue(Stream& s);

  LocalMemory own_;
  TcpPeer peer_;
  TcpEngine& engine_;
  std::unique_ptr<BoardCopy> copy_;  // the peer's, as received

  struct OpenPut {
    uint64_t offset = 0;
    const std::byte* src = nullptr;
    size_t bytes = 0, assigned = 0;
    bool active = false;
  } put_;
  struct Landing {
    uint64_t offset = 0;
    size_t bytes = 0;  // 0: free
    std::byte* dst = nullptr;
    bool used = false;  // the put goes there, or has gone
  };
  // Sends the rest of a put that is arriving there into the staging, and returns whether there was one.
  bool take_back(const Landing& l);
  std::array<Landing, 4> landings_;
  std::array<uint64_t, kSigsPerPeer> words_ = {};
  uint32_t new_words_ = 0;                        // bit mask of words_ that wait
  std::array<uint64_t, kMaxStreams> marks_ = {};  // put bytes on each stream before the newest signal
  BoardNews news_;                                // of this rank's board
  bool board_waits_ = false;                      // to be sent as soon as there is room
  bool ending_ = false, queued_ = false, sending_ = false;
};

}  // namespace moeccl::transport::tcp
