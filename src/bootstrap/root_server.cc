// SPDX-License-Identifier: Apache-2.0
#include "src/bootstrap/root_server.h"

#include <unistd.h>

#include <algorithm>

#include "src/base/log.h"
#include "src/bootstrap/patience.h"

namespace moeccl::bootstrap {
namespace {

constexpr int kAcceptsAtOnce = 32;  // limited so that the connections that are already here get their turn

// Ranks of one job belong to one user; root may belong to any job. Other users hold no key and only cost time.
bool of_this_user(int fd) {
  const Result<driver::PeerCredentials> peer = driver::peer_credentials(fd);
  return peer.ok() && (peer->uid == ::geteuid() || peer->uid == 0 || ::geteuid() == 0);
}

}  // namespace

RootServer::RootServer(const Config& config, std::vector<Fd> listeners, std::vector<HandoutListener> handouts,
                       const Wishes& wishes, driver::Poller poller)
    : config_(config),
      listeners_(std::move(listeners)),
      handouts_(std::move(handouts)),
      wishes_(wishes),
      poller_(std::move(poller)),
      deadline_(Deadline::after_ms(config.timeout_ms)) {}

Result<std::unique_ptr<RootServer>> RootServer::create(const Config& config, std::vector<Fd> listeners,
                                                       std::vector<HandoutListener> handouts, const Wishes& wishes) {
  MOECCL_ASSIGN_OR_RETURN(driver::Poller poller, driver::Poller::create());
  for (size_t i = 0; i < listeners.size(); ++i) MOECCL_TRY(poller.add(listeners[i].get(), EPOLLIN, kListener + i));
  for (size_t i = 0; i < handouts.size(); ++i) MOECCL_TRY(poller.add(handouts[i].fd(), EPOLLIN, kHandout + i));
  MOECCL_TRY(poller.add(wishes.end, EPOLLIN, kEnd));
  MOECCL_TRY(poller.add(wishes.leave_place, EPOLLIN, kLeavePlace));
  return std::unique_ptr<RootServer>(
      new RootServer(config, std::move(listeners), std::move(handouts), wishes, std::move(poller)));
}

Connection* RootServer::find(Id id) const {
  const auto found = connections_.find(id);
  return found == connections_.end() ? nullptr : found->second.get();
}

void RootServer::run() {
  while (!finished()) {
    Result<std::span<const epoll_event>> events = poller_.wait(next_deadline());
    if (!events.ok()) {
      log(LogLevel::kError, "bootstrap: {}", events.status().message());
      return;
    }
    for (const epoll_event& event : *events) on_event(event);
    on_time();
  }
}

bool RootServer::finished() const {
  if (ended_ || over_) return true;
  if (failure_.ok()) return joined_ && n_left_ == static_cast<int>(members_.size());
  if (linger_.passed()) return true;
  // After a failure, the server ends when every rank has been told and has received it (its connection is then closed).
  const auto told = [](const Member& m) { return m.told && m.connection == 0; };
  return !members_.empty() && std::all_of(members_.begin(), members_.end(), told);
}

Deadline RootServer::next_deadline() const {
  Deadline next = Deadline::earlier(deadline_, failure_.ok() ? round_.deadline : linger_);
  if (lobby_.size() > 0) next = Deadline::earlier(next, {lobby_.next_overdue_ns()});
  if (accept_again_ns_ != 0) next = Deadline::earlier(next, {accept_again_ns_});
  if (!throttled_.empty()) next = Deadline::earlier(next, Deadline::after_ms(1));
  return next;
}

void RootServer::on_event(const epoll_event& event) {
  const uint64_t tag = event.data.u64;
  if (tag == kEnd) {
    ended_ = true;
  } else if (tag == kLeavePlace) {
    poller_.remove(wishes_.leave_place);
    if (!joined_) fail(error(moecclRemoteError, "rank 0 has given up, and tries again at this meeting place"));
    close_listeners();
  } else if (tag < kListener) {
    hand_out(tag - kHandout);
  } else if (tag < kFirstConnection) {
    accept_some(tag - kListener);
  } else if ((tag & kProcess) != 0) {
    on_process_end(static_cast<int32_t>(tag & 0x7fffffff));
  } else {
    if ((event.events & EPOLLOUT) != 0) flush(tag);
    if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) on_readable(tag);
  }
}

void RootServer::on_time() {
  const int64_t now = now_ns();
  if (accept_again_ns_ != 0 && now >= accept_again_ns_) set_accepting(true);
  while (const Id id = lobby_.overdue(now)) drop(id);
  for (const Id id : std::exchange(throttled_, {})) flush(id);
  if (failure_.ok() && (round_.deadline.passed() || deadline_.passed())) on_round_timeout();
}

// Returns false if all strangers are too young.
bool RootServer::make_room() {
  const Id id = lobby_.expendable(now_ns());
  if (id != 0) drop(id);
  return id != 0;
}

void RootServer::set_accepting(bool on) {
  const uint32_t events = on ? uint32_t{EPOLLIN} : 0;
  for (size_t i = 0; i < listeners_.size(); ++i) {
    if (!poller_.modify(listeners_[i].get(), events, kListener + i).ok()) over_ = true;
  }
  for (size_t i = 0; i < handouts_.size(); ++i) {
    if (!poller_.modify(handouts_[i].fd(), events, kHandout + i).ok()) over_ = true;
  }
  if (on) accept_again_ns_ = 0;
}

void RootServer::pause_accepting() {
  set_accepting(false);
  accept_again_ns_ = now_ns() + Lobby::kPauseNs;
}

void RootServer::close_listeners() {
  listeners_.clear();
  handouts_.clear();
  accept_again_ns_ = 0;
  std::vector<Id> strangers;
  for (const auto& [id, c] : connections_) {
    if (c->state != Connection::State::kMember) strangers.push_back(id);
  }
  for (const Id id : strangers) drop(id);
}

// The id is smaller than any socket's buffer, so it is sent whole unless the peer has gone.
void RootServer::hand_out(size_t listener) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    if (listener >= handouts_.size()) return;  // closed by an event before this one
    const Result<Fd> accepted = driver::accept_now(handouts_[listener].fd());
    if (!accepted.ok()) return pause_accepting();
    if (!accepted.value()) return;
    const Result<driver::PeerCredentials> peer = driver::peer_credentials(accepted.value().get());
    const bool unseen = peer.ok() && peer->pid == 0;
    if (peer.ok() && peer->uid == ::geteuid() && !(unseen && config_.handout_to_these_pids))
      static_cast<void>(driver::send_now(accepted.value().get(), std::as_bytes(std::span(config_.id.internal))));
  }
}

void RootServer::accept_some(size_t listener) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    if (listener >= listeners_.size()) return;  // closed by an event before this one
    if (lobby_.full() && !make_room()) return pause_accepting();
    Result<Fd> accepted = driver::accept_now(listeners_[listener].get());
    if (!accepted.ok()) {
      // Out of descriptors or memory, which strangers may be holding.
      if (make_room()) return;
      if (const Status why = lobby_.failed_to_accept(accepted.status(), now_ns()); !why.ok()) fail(why);
      return pause_accepting();
    }
    lobby_.has_accepted();
    if (!*accepted) return;
    const bool crowded = lobby_.size() > 0 && Lobby::few_left(accepted->get()) && !make_room();
    if (!config_.over_unix) {
      static_cast<void>(driver::set_no_delay(accepted->get()));
      static_cast<void>(driver::set_lost_after(accepted->get(), kLostMs));
    }
    if (config_.over_unix && !of_this_user(accepted->get())) continue;
    const Id id = next_id_++;
    auto connection = std::make_unique<Connection>(std::move(*accepted), config_.over_unix);
    connection->interest = EPOLLIN;
    if (!poller_.add(connection->fd(), EPOLLIN, id).ok()) continue;
    connections_.emplace(id, std::move(connection));
    lobby_.enter(id, now_ns());
    on_readable(id);  // the hello has often arrived already
    if (crowded) return pause_accepting();
  }
}

void RootServer::on_readable(Id id) {
  Connection* c = find(id);
  if (c == nullptr) return;
  if (c->state == Connection::State::kMember) return read_all(id);
  HandshakeFrame frame;
  switch (c->read_handshake(&frame)) {
    case Connection::Found::kFrame:
      return on_handshake(id, c, frame);
    case Connection::Found::kEnd:
      return drop(id);
    default:
      return;
  }
}

void RootServer::on_handshake(Id id, Connection* c, const HandshakeFrame& frame) {
  if (c->state == Connection::State::kProof) {
    if (!c->handshake->on_proof(frame)) return drop(id);
    const Authenticated client = c->handshake->result();
    if (c->handshake->skewed()) {
      drop(id);
      // This is a rank of the group and not its overheard hello, so the group cannot form.
      return fail(error(moecclUnsupported, "rank {} speaks {}, the meeting point {}: use one version on all ranks",
                        client.peer.rank, version_text(client.peer), version_text(Party{})));
    }
    c->become_member(client.keys);
    lobby_.leave(id);
    return admit(id, c, client.peer);
  }
  const Result<Fresh> fresh = Fresh::make(!config_.over_unix);
  if (c->state != Connection::State::kHello || !fresh.ok()) return drop(id);
  c->handshake.emplace(config_.key, Party{Role::kRoot, config_.number, static_cast<uint32_t>(members_.size())}, *fresh);
  const ServerHandshake::Answer answer = c->handshake->on_hello(frame, Role::kMember);
  if (answer.verdict == ServerHandshake::Verdict::kStranger) {
    if (answer.wrong_key) refused_ = c->from();
    return drop(id);
  }
  c->queue_raw(answer.reply);
  if (answer.verdict == ServerHandshake::Verdict::kSkew && !answer.holds_key) {
    static_cast<void>(c->flush());  // fits into the empty socket buffer
    return drop(id);
  }
  c->state = Connection::State::kProof;
  lobby_.said_hello(id);
  flush(id);
}

void RootServer::read_all(Id id) {
  for (;;) {
    Connection* c = find(id);
    if (c == nullptr) return;
    ControlMessage message;
    Status why;
    switch (c->read_message(&message, &why)) {
      case Connection::Found::kMessage:
        on_message(id, std::move(message));
        break;
      case Connection::Found::kEnd:
        return on_lost(id, why);
      default:
        return;
    }
  }
}

void RootServer::flush(Id id) {
  Connection* c = find(id);
  if (c == nullptr) return;
  const Connection::Flushed flushed = c->flush();
  if (flushed == Connection::Flushed::kBroken) {
    if (c->state != Connection::State::kMember) return drop(id);
    // Messages that the member sent before it went, such as kLeave, still count: reading finds them, then the end.
  }
  if (flushed == Connection::Flushed::kThrottled) throttled_.push_back(id);
  const uint32_t interest = EPOLLIN | (flushed == Connection::Flushed::kBlocked ? uint32_t{EPOLLOUT} : 0);
  if (interest == c->interest) return;
  c->interest = interest;
  if (!poller_.modify(c->fd(), interest, id).ok()) drop(id);
}

void RootServer::drop(Id id) {
  Connection* c = find(id);
  if (c == nullptr) return;
  lobby_.leave(id);
  poller_.remove(c->fd());
  if (c->rank >= 0 && member_of(c->rank).connection == id) member_of(c->rank).connection = 0;
  connections_.erase(id);
}

}  // namespace moeccl::bootstrap
