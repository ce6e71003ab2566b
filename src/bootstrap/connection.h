// SPDX-License-Identifier: Apache-2.0
// One connection, as its root sees it. Turns received bytes into frames and frames into bytes to send; knows no group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/socket.h"

namespace moeccl::bootstrap {

using SharedPayload = SealedPayload;                       // encoded once, sent to many
using SharedFds = std::shared_ptr<const std::vector<Fd>>;  // closed when the last receiver has its duplicates

struct ControlMessage {
  uint16_t type = 0;
  std::vector<std::byte> payload;
  std::vector<Fd> fds;
};

class Connection {
 public:
  enum class State : uint8_t { kHello, kProof, kMember };
  // The result of a read step.
  enum class Found : uint8_t { kNothing, kFrame, kMessage, kEnd };

  Connection(Fd fd, bool over_unix) : fd_(std::move(fd)), over_unix_(over_unix) {}

  int fd() const { return fd_.get(); }
  bool over_unix() const { return over_unix_; }
  // Returns "in process 1234", "on this host" where that number is not seen here, or "at 10.0.0.2".
  std::string from() const;

  // Before authentication: returns a handshake frame when it is complete, or kEnd for a stranger, at the first byte
  // that reveals it.
  Found read_handshake(HandshakeFrame* frame);
  // After authentication.
  void become_member(const SessionKeys& keys);
  // kEnd: the peer closed the connection or sent something invalid. `why` then says more, or is ok() for a plain end.
  Found read_message(ControlMessage* message, Status* why);

  void queue_raw(std::span<const std::byte> bytes);
  void queue(uint16_t type, std::shared_ptr<const SharedPayload> payload, SharedFds fds = nullptr);
  enum class Flushed : uint8_t { kAll, kBlocked, kThrottled, kBroken };
  Flushed flush();
  bool has_output() const { return !out_.empty(); }

  State state = State::kHello;
  std::optional<ServerHandshake> handshake;
  uint32_t interest = 0;  // the events for which it is registered
  int rank = -1;          // of a member; -1 before
  Peer peer;

 private:
  struct Out {
    std::vector<std::byte> head;
    std::shared_ptr<const SharedPayload> payload;
    SharedFds fds;  // sent with the first byte; released once sent
  };
  Found read_into(std::span<std::byte> to, Status* why);

  Fd fd_;
  bool over_unix_;
  size_t n_in_ = 0;  // bytes received so far of the current handshake frame, head or payload
  HandshakeFrame handshake_in_ = {};
  ControlHeadBytes head_in_ = {};
  bool in_payload_ = false;
  ControlHead head_;
  ControlMessage message_;
  std::vector<Fd> fds_in_;
  Opener opener_;
  Sealer sealer_;
  std::deque<Out> out_;
  size_t n_out_ = 0;  // bytes sent of out_.front()
};

}  // namespace moeccl::bootstrap
