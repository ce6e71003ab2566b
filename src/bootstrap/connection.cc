// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/connection.h"

#include "src/bootstrap/messages.h"

namespace moeccl::bootstrap {

std::string Connection::from() const {
  if (over_unix_) {
    const Result<driver::PeerCredentials> peer = driver::peer_credentials(fd());
    return peer.ok() && peer->pid > 0 ? format("in process {}", peer->pid) : "on this host";
  }
  const Result<driver::SocketAddress> peer = driver::peer_address(fd());
  return format("at {}", peer.ok() ? peer->host() : "an unknown address");
}

Connection::Found Connection::read_handshake(HandshakeFrame* frame) {
  // Uses plain reads, so that the kernel closes descriptors that a stranger sends along.
  Result<driver::IoStep> step = driver::recv_now(fd_.get(), std::span(handshake_in_).subspan(n_in_));
  if (!step.ok()) return Found::kEnd;
  if (step->would_block) return Found::kNothing;
  n_in_ += step->n;
  if (step->n == 0 || !starts_like_handshake(std::span(handshake_in_).first(n_in_))) return Found::kEnd;
  if (n_in_ < handshake_in_.size()) return Found::kNothing;
  n_in_ = 0;
  *frame = handshake_in_;
  return Found::kFrame;
}

void Connection::become_member(const SessionKeys& keys) {
  sealer_ = Sealer(keys.send);
  opener_ = Opener(keys.receive);
  handshake.reset();
  state = State::kMember;
}

// Continues reading into `to`, of which n_in_ bytes are filled. Returns kMessage when it is full.
Connection::Found Connection::read_into(std::span<std::byte> to, Status* why) {
  while (n_in_ < to.size()) {
    const std::span<std::byte> rest = to.subspan(n_in_);
    Result<driver::IoStep> step =
        over_unix_ ? driver::recv_fds_now(fd_.get(), rest, &fds_in_) : driver::recv_now(fd_.get(), rest);
    if (!step.ok()) {
      if (step.status().code() != moecclRemoteError) *why = step.status();
      return Found::kEnd;
    }
    if (step->would_block) return Found::kNothing;
    if (step->n == 0) return Found::kEnd;
    n_in_ += step->n;
    if (fds_in_.size() > kMaxFdsPerRank) {
      *why = Status(moecclRemoteError, "more descriptors arrived than any call sends");
      return Found::kEnd;
    }
  }
  n_in_ = 0;
  return Found::kMessage;
}

Connection::Found Connection::read_message(ControlMessage* message, Status* why) {
  if (!in_payload_) {
    const Found found = read_into(head_in_, why);
    if (found != Found::kMessage) return found;
    Result<ControlHead> head = opener_.open(head_in_, kMaxRequestBytes);
    if (!head.ok()) {
      *why = head.status();
      return Found::kEnd;
    }
    head_ = *head;
    message_.type = head_.type;
    message_.payload.resize(head_.n_bytes);
    in_payload_ = true;
  }
  const Found found = read_into(message_.payload, why);
  if (found != Found::kMessage) return found;
  in_payload_ = false;
  if (!open_payload(head_, message_.payload) || fds_in_.size() != head_.n_fds) {
    *why = Status(moecclRemoteError, "a control frame is not what was announced");
    return Found::kEnd;
  }
  message_.fds = std::exchange(fds_in_, {});
  *message = std::exchange(message_, {});
  return Found::kMessage;
}

void Connection::queue_raw(std::span<const std::byte> bytes) {
  out_.push_back({{bytes.begin(), bytes.end()}, nullptr, nullptr});
}

void Connection::queue(uint16_t type, std::shared_ptr<const SharedPayload> payload, SharedFds fds) {
  const ControlHeadBytes sealed = sealer_.seal(payload->head(type, fds ? fds->size() : 0));
  Out out = {{sealed.begin(), sealed.end()}, std::move(payload), std::move(fds)};
  constexpr size_t kCopiedBytes = 4096;  // below this, a copy is cheaper than a second system call
  if (out.payload->bytes.size() <= kCopiedBytes) {
    out.head.insert(out.head.end(), out.payload->bytes.begin(), out.payload->bytes.end());
    out.payload.reset();
  }
  out_.push_back(std::move(out));
}

Connection::Flushed Connection::flush() {
  while (!out_.empty()) {
    Out& out = out_.front();
    const bool in_head = n_out_ < out.head.size();
    const size_t n_payload = out.payload ? out.payload->bytes.size() : 0;
    if (!in_head && n_out_ == out.head.size() + n_payload) {
      out_.pop_front();
      n_out_ = 0;
      continue;
    }
    const std::span<const std::byte> rest = in_head ? std::span<const std::byte>(out.head).subspan(n_out_)
                                                    : std::span(out.payload->bytes).subspan(n_out_ - out.head.size());
    std::vector<int> fds;
    if (n_out_ == 0 && out.fds) {
      for (const Fd& fd : *out.fds) fds.push_back(fd.get());
    }
    Result<driver::IoStep> step = driver::send_fds_now(fd_.get(), rest, fds);
    if (!step.ok()) return Flushed::kBroken;
    if (step->would_block) return step->fds_in_flight ? Flushed::kThrottled : Flushed::kBlocked;
    n_out_ += step->n;
    out.fds.reset();
  }
  return Flushed::kAll;
}

}  // namespace moeccl::bootstrap
