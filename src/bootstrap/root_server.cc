#include "src/bootstrap/root_server.h"

#include <unistd.h>

#include <algorithm>

#include "src/base/log.h"
#include "src/base/random.h"

namespace moeccl::bootstrap {
namespace {

// A peer that holds the key needs two round trips and no thought; 2 s cover a slow network and a busy machine.
constexpr int64_t kHandshakeNs = 2'000'000'000;
// Descriptors that strangers may hold at once. 1000 silent ones pass through in 8 batches of kSilentNs.
constexpr size_t kMaxPending = 128;
// The age at which a connection that has said nothing makes room for another: a rank sends its hello with its connect.
constexpr int64_t kSilentNs = 20'000'000;
// The same for one that said a right hello: it needs one round trip more.
constexpr int64_t kHalfwayNs = 250'000'000;
constexpr int kAcceptsAtOnce = 32;  // so that those who are here get their turn

}  // namespace

RootServer::RootServer(const Config& config, Fd listener, Fd handout, int stop, driver::Poller poller)
    : config_(config),
      listener_(std::move(listener)),
      handout_(std::move(handout)),
      stop_fd_(stop),
      poller_(std::move(poller)),
      deadline_(Deadline::after_ms(config.timeout_ms)) {}

Result<std::unique_ptr<RootServer>> RootServer::create(const Config& config, Fd listener, Fd handout, int stop) {
  MOECCL_ASSIGN_OR_RETURN(driver::Poller poller, driver::Poller::create());
  MOECCL_TRY(poller.add(listener.get(), EPOLLIN, kListener));
  if (handout) MOECCL_TRY(poller.add(handout.get(), EPOLLIN, kHandout));
  MOECCL_TRY(poller.add(stop, EPOLLIN, kStop));
  return std::unique_ptr<RootServer>(
      new RootServer(config, std::move(listener), std::move(handout), stop, std::move(poller)));
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
  if (stopped_ || over_) return true;
  if (failure_.ok()) return joined_ && n_left_ == static_cast<int>(members_.size());
  if (linger_.passed()) return true;
  // After a failure: when every rank has been told and has taken it (its connection is closed by then).
  const auto told = [](const Member& m) { return m.told && m.connection == 0; };
  return !members_.empty() && std::all_of(members_.begin(), members_.end(), told);
}

Deadline RootServer::next_deadline() const {
  Deadline next = Deadline::earlier(deadline_, failure_.ok() ? round_.deadline : linger_);
  if (!pending_.empty()) {
    next = Deadline::earlier(next, {connections_.at(pending_.front())->accepted_ns() + kHandshakeNs});
  }
  if (accept_again_ns_ != 0) next = Deadline::earlier(next, {accept_again_ns_});
  if (!throttled_.empty()) next = Deadline::earlier(next, Deadline::after_ms(1));
  return next;
}

void RootServer::on_event(const epoll_event& event) {
  const uint64_t tag = event.data.u64;
  if (tag == kStop) {
    stopped_ = true;
  } else if (tag == kListener || tag == kHandout) {
    accept_some(tag == kHandout);
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
  while (!pending_.empty() && connections_.at(pending_.front())->accepted_ns() + kHandshakeNs <= now) {
    drop(pending_.front());
  }
  for (const Id id : std::exchange(throttled_, {})) flush(id);
  if (failure_.ok() && (round_.deadline.passed() || deadline_.passed())) on_round_timeout();
}

// Makes room among the pending; false when all of them are too young.
bool RootServer::make_room() {
  const int64_t now = now_ns();
  Id halfway = 0;
  for (const Id id : pending_) {
    const Connection& c = *connections_.at(id);
    const int64_t age = now - c.accepted_ns();
    if (c.state == Connection::State::kHello && age >= kSilentNs) {
      drop(id);
      return true;
    }
    if (halfway == 0 && age >= kHalfwayNs) halfway = id;
  }
  if (halfway != 0) drop(halfway);
  return halfway != 0;
}

void RootServer::set_accepting(bool on) {
  const uint32_t events = on ? uint32_t{EPOLLIN} : 0;
  if (listener_ && !poller_.modify(listener_.get(), events, kListener).ok()) over_ = true;
  if (handout_ && !poller_.modify(handout_.get(), events, kHandout).ok()) over_ = true;
  if (on) accept_again_ns_ = 0;
}

void RootServer::pause_accepting() {
  set_accepting(false);
  accept_again_ns_ = now_ns() + kSilentNs;
}

void RootServer::close_listeners() {
  listener_.reset();
  handout_.reset();
  accept_again_ns_ = 0;
  while (!pending_.empty()) drop(pending_.front());
}

void RootServer::accept_some(bool handout) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    const Fd& listener = handout ? handout_ : listener_;
    if (!listener) return;  // closed by an event before this one
    if (!handout && pending_.size() >= kMaxPending && !make_room()) return pause_accepting();
    Result<Fd> accepted = driver::accept_now(listener.get());
    if (!accepted.ok()) {
      // Out of descriptors or memory: strangers may hold them. Try again in a moment.
      if (!make_room()) pause_accepting();
      return;
    }
    if (!*accepted) return;
    if (handout) {
      Result<driver::PeerCredentials> peer = driver::peer_credentials(accepted->get());
      // The id is smaller than any socket's buffer: it is sent whole or the peer has gone.
      if (peer.ok() && peer->uid == ::geteuid()) {
        static_cast<void>(driver::send_now(accepted->get(), std::as_bytes(std::span(config_.id.internal))));
      }
      continue;
    }
    if (!config_.over_unix) static_cast<void>(driver::set_no_delay(accepted->get()));
    const Id id = next_id_++;
    auto connection = std::make_unique<Connection>(std::move(*accepted), config_.over_unix);
    connection->interest = EPOLLIN;
    if (!poller_.add(connection->fd(), EPOLLIN, id).ok()) continue;
    connections_.emplace(id, std::move(connection));
    pending_.push_back(id);
    on_readable(id);  // the hello is often here already
  }
}

void RootServer::on_readable(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection* c = found->second.get();
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
    c->become_member(client.keys);
    forget_pending(id);
    return admit(id, c, client.peer);
  }
  Nonce nonce;
  if (c->state != Connection::State::kHello || !random_bytes(nonce.data(), nonce.size()).ok()) return drop(id);
  c->handshake.emplace(config_.key, Party{Role::kRoot, 0, static_cast<uint32_t>(members_.size())}, nonce);
  const ServerHandshake::Answer answer = c->handshake->on_hello(frame, Role::kMember);
  if (answer.verdict == ServerHandshake::Verdict::kStranger) return drop(id);
  c->queue_raw(answer.reply);
  if (answer.verdict == ServerHandshake::Verdict::kContinue) {
    c->state = Connection::State::kProof;
    return flush(id);
  }
  static_cast<void>(c->flush());  // fits into the empty buffer
  const Party peer = c->handshake->result().peer;
  drop(id);
  // Whoever holds the key is one of the group, and the group cannot form.
  if (answer.holds_key) {
    fail(error(moecclUnsupported, "rank {} speaks {}, the meeting point {}: use one version on all ranks", peer.rank,
               version_text(peer), version_text(Party{})));
  }
}

void RootServer::read_all(Id id) {
  for (;;) {
    const auto found = connections_.find(id);
    if (found == connections_.end()) return;
    ControlMessage message;
    Status why;
    switch (found->second->read_message(&message, &why)) {
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
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection* c = found->second.get();
  const Connection::Flushed flushed = c->flush();
  if (flushed == Connection::Flushed::kBroken) {
    if (c->state != Connection::State::kMember) return drop(id);
    // What the member said before it went, such as that it leaves, still counts: the reader finds it, then the end.
  }
  if (flushed == Connection::Flushed::kThrottled) throttled_.push_back(id);
  const uint32_t interest = EPOLLIN | (flushed == Connection::Flushed::kBlocked ? uint32_t{EPOLLOUT} : 0);
  if (interest == c->interest) return;
  c->interest = interest;
  if (!poller_.modify(c->fd(), interest, id).ok()) drop(id);
}

void RootServer::forget_pending(Id id) {
  const auto found = std::find(pending_.begin(), pending_.end(), id);
  if (found != pending_.end()) pending_.erase(found);
}

void RootServer::drop(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  Connection* c = found->second.get();
  if (c->state != Connection::State::kMember) forget_pending(id);
  poller_.remove(c->fd());
  if (c->rank >= 0 && members_[static_cast<size_t>(c->rank)].connection == id) {
    members_[static_cast<size_t>(c->rank)].connection = 0;
  }
  connections_.erase(found);
}

}  // namespace moeccl::bootstrap
