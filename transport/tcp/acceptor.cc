// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/acceptor.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "src/base/log.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "src/bootstrap/messages.h"
#include "transport/common/still_wanted.h"

namespace moeccl::transport::tcp {
namespace {

constexpr int kLookEveryMs = 100;   // how often to check whether to stop
constexpr int kAcceptsAtOnce = 32;  // so that connections that are already here get their turn

}  // namespace

// A connection in progress: hello, proof, then the sealed greeting.
struct Acceptor::Pending {
  enum class Await : uint8_t { kHello, kProof, kGreeting };
  Fd fd;
  Await await = Await::kHello;
  std::unique_ptr<bootstrap::ServerHandshake> handshake;
  std::byte in[bootstrap::kControlHeadBytes + sizeof(StreamGreeting)];
  size_t n_in = 0;

  size_t wanted() const { return await == Await::kGreeting ? sizeof(in) : bootstrap::kHandshakeFrameBytes; }
  static_assert(sizeof(in) >= bootstrap::kHandshakeFrameBytes);
};

Acceptor::Acceptor(const MeshOptions& options, std::span<const Fd> listeners, std::vector<uint32_t> expected)
    : options_(options), listeners_(listeners) {
  for (const uint32_t rank : expected) coming_[rank];
}

Acceptor::~Acceptor() = default;

bool Acceptor::complete() const {
  return std::all_of(coming_.begin(), coming_.end(),
                     [](const auto& c) { return c.second.n_there > 0 && c.second.n_there == c.second.fds.size(); });
}

// Returns "10.0.0.1:4711 or 10.1.0.1:4712".
std::string Acceptor::places() const {
  std::string all;
  for (const Fd& l : listeners_) {
    const Result<driver::SocketAddress> at = driver::local_address(l.get());
    if (at.ok()) all += (all.empty() ? "" : " or ") + at->str();
  }
  return all;
}

Status Acceptor::run(const std::atomic<bool>& stop) {
  while (!complete()) {
    if (stop.load()) return error(moecclAborted, "connecting to other ranks failed first");
    MOECCL_TRY(still_wanted(options_.watch));
    if (options_.deadline.passed()) {
      std::vector<int> missing;
      for (const auto& [rank, c] : coming_) {
        if (c.n_there == 0 || c.n_there < c.fds.size()) missing.push_back(static_cast<int>(rank));
      }
      return error(moecclTimeout,
                   "rank {} got no TCP connection from {} at {}: can they reach it there (MOECCL_SOCKET_IFNAME), and "
                   "does no firewall close these ports (MOECCL_PORT_RANGE)?",
                   options_.rank, bootstrap::describe_ranks(missing), places());
    }
    std::vector<pollfd> entries{{options_.watch.fd, POLLIN, 0}};  // poll() skips a negative descriptor
    for (const Fd& l : listeners_) entries.push_back({l.get(), static_cast<short>(pause_ ? 0 : POLLIN), 0});
    std::vector<bootstrap::Lobby::Id> ids;
    for (const auto& [id, p] : pending_) {
      entries.push_back({p->fd.get(), POLLIN, 0});
      ids.push_back(id);
    }
    const int most_ms = pause_ ? static_cast<int>(bootstrap::Lobby::kPauseNs / 1'000'000) : kLookEveryMs;
    (void)::poll(entries.data(), entries.size(), std::min(most_ms, options_.deadline.remaining_ms()));
    pause_ = false;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (entries[1 + listeners_.size() + i].revents != 0 && !step(ids[i], *pending_.at(ids[i]))) drop(ids[i]);
    }
    while (const bootstrap::Lobby::Id id = lobby_.overdue(now_ns())) drop(id);
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if (entries[1 + i].revents != 0) MOECCL_TRY(accept_some(entries[1 + i].fd));
    }
  }
  return {};
}

void Acceptor::drop(bootstrap::Lobby::Id id) {
  lobby_.leave(id);
  pending_.erase(id);
}

bool Acceptor::make_room() {
  const bootstrap::Lobby::Id id = lobby_.expendable(now_ns());
  if (id != 0) drop(id);
  return id != 0;
}

Status Acceptor::accept_some(int listener) {
  for (int i = 0; i < kAcceptsAtOnce && !pause_; ++i) {
    if (lobby_.full() && !make_room()) {
      pause_ = true;
      return {};
    }
    Result<Fd> fd = driver::accept_now(listener);
    if (!fd.ok()) {
      // Descriptors or memory have run out: strangers may hold them.
      if (make_room()) return {};
      pause_ = true;
      return lobby_.failed_to_accept(fd.status(), now_ns());
    }
    lobby_.has_accepted();
    if (!*fd) return {};
    pause_ = lobby_.size() > 0 && bootstrap::Lobby::few_left(fd->get()) && !make_room();
    const bootstrap::Lobby::Id id = next_id_++;
    auto p = std::make_unique<Pending>();
    p->fd = std::move(*fd);
    lobby_.enter(id, now_ns());
    Pending& here = *pending_.emplace(id, std::move(p)).first->second;
    if (!step(id, here)) drop(id);  // the hello has often arrived already
  }
  return {};
}

bool Acceptor::step(bootstrap::Lobby::Id id, Pending& p) {
  for (;;) {
    const Result<driver::IoStep> got =
        driver::recv_now(p.fd.get(), std::span<std::byte>(p.in + p.n_in, p.wanted() - p.n_in));
    if (!got.ok() || (got->n == 0 && !got->would_block)) return false;
    if (got->would_block) return true;
    p.n_in += got->n;
    if (p.await != Pending::Await::kGreeting && !bootstrap::starts_like_handshake({p.in, p.n_in})) return false;
    if (p.n_in < p.wanted()) continue;
    if (p.await == Pending::Await::kGreeting) {
      keep(p);
      return false;  // kept or not, it waits here no longer
    }
    if (!answer(id, p)) return false;
  }
}

// Answers a hello or a proof.
bool Acceptor::answer(bootstrap::Lobby::Id id, Pending& p) {
  const bootstrap::HandshakeFrameView frame(p.in, bootstrap::kHandshakeFrameBytes);
  p.n_in = 0;
  if (p.await == Pending::Await::kProof) {
    p.await = Pending::Await::kGreeting;
    lobby_.leave(id);  // it is a peer, whose greeting comes when its other connections are there, too
    return p.handshake->on_proof(frame);
  }
  const Result<bootstrap::Fresh> fresh = bootstrap::Fresh::make(options_.cipher != Cipher::kNone);
  if (!fresh.ok()) return false;
  const bootstrap::Party self = {bootstrap::Role::kLinkServer, options_.rank, options_.n_ranks};
  p.handshake = std::make_unique<bootstrap::ServerHandshake>(options_.key, self, *fresh);
  const auto answer = p.handshake->on_hello(frame, bootstrap::Role::kLinkClient);
  if (answer.verdict == bootstrap::ServerHandshake::Verdict::kStranger) return false;
  lobby_.said_hello(id);
  // The socket of a new connection takes this little at once.
  const Result<driver::IoStep> sent = driver::send_now(p.fd.get(), answer.reply);
  p.await = Pending::Await::kProof;
  return sent.ok() && sent->n == answer.reply.size() &&
         answer.verdict == bootstrap::ServerHandshake::Verdict::kContinue;
}

// Takes an authenticated peer's greeting and keeps its stream.
void Acceptor::keep(Pending& p) {
  const bootstrap::Authenticated& client = p.handshake->result();
  bootstrap::Opener opener(client.keys.receive);
  const std::span<const std::byte> payload(p.in + bootstrap::kControlHeadBytes, sizeof(StreamGreeting));
  const Result<bootstrap::ControlHead> head = opener.open(
      std::span<const std::byte, bootstrap::kControlHeadBytes>(p.in, bootstrap::kControlHeadBytes), payload.size());
  if (!head.ok() || head->type != kGreetingType || head->n_bytes != payload.size() ||
      head->digest != bootstrap::digest_of(payload)) {
    return;
  }
  StreamGreeting g;
  std::memcpy(&g, payload.data(), sizeof(g));
  const auto at = coming_.find(client.peer.rank);
  if (at == coming_.end() || client.peer.n_ranks != options_.n_ranks || g.wire_version != kWireVersion ||
      g.n_streams == 0 || g.n_streams > kMaxStreams || g.stream >= g.n_streams ||
      g.cipher > static_cast<uint16_t>(Cipher::kAes256Gcm) || (g.cipher == 0) != (options_.cipher == Cipher::kNone)) {
    log(LogLevel::kWarn, "rank {} refuses a connection of rank {}: it is not expected, or of another version",
        options_.rank, client.peer.rank);
    return;
  }
  Coming& c = at->second;
  if (c.fds.empty()) {
    c.fds.resize(g.n_streams);
    c.weights.resize(g.n_streams);
    c.keys.resize(g.n_streams);
  }
  if (c.fds.size() != g.n_streams || c.fds[g.stream]) return;
  if (const Status st = prepare(p.fd.get(), options_); !st.ok()) {
    log(LogLevel::kWarn, "rank {} refuses a connection of rank {}: {}", options_.rank, client.peer.rank, st.message());
    return;
  }
  // The peer waits for this, because what it sent before may have gone to a connection that was dropped to make room.
  bootstrap::Sealer sealer(client.keys.send);
  bootstrap::ControlHead welcome;
  const Cipher cipher = common_cipher(options_.cipher, static_cast<Cipher>(g.cipher));
  welcome.type = static_cast<uint16_t>(kWelcomeType + static_cast<uint16_t>(cipher));
  welcome.digest = bootstrap::digest_of({});
  const bootstrap::ControlHeadBytes sealed = sealer.seal(welcome);
  const Result<driver::IoStep> sent = driver::send_now(p.fd.get(), sealed);
  if (!sent.ok() || sent->n != sealed.size()) return;
  const Result<driver::SocketAddress> from = driver::peer_address(p.fd.get());
  if (c.where.empty() && from.ok()) c.where = from->str();
  c.fds[g.stream] = std::move(p.fd);
  c.keys[g.stream] = {cipher, client.keys.send, client.keys.receive};
  c.weights[g.stream] = static_cast<double>(std::max<uint64_t>(1, g.mbit_per_s));
  ++c.n_there;
}

std::vector<TcpPeer> Acceptor::take() {
  std::vector<TcpPeer> peers;
  for (auto& [rank, c] : coming_) {
    TcpPeer peer;
    peer.rank = rank;
    peer.where = std::move(c.where);
    for (size_t i = 0; i < c.fds.size(); ++i) {
      peer.streams.emplace_back(std::move(c.fds[i]), c.weights[i], c.keys[i]);
      peer.cipher = c.keys[i].cipher;
    }
    peers.push_back(std::move(peer));
  }
  return peers;
}

}  // namespace moeccl::transport::tcp
