#include "transport/tcp/acceptor.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "src/base/log.h"
#include "src/base/random.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"

namespace moeccl::transport::tcp {
namespace {

constexpr int64_t kGreetingNs = 10'000'000'000;  // a connection that says less by then is dropped
constexpr size_t kMaxPending = 1024;             // strangers cannot take all descriptors
constexpr int kLookEveryMs = 100;                // whether to stop

}  // namespace

// A connection on its way: hello, proof, then the sealed greeting.
struct Acceptor::Pending {
  enum class Await : uint8_t { kHello, kProof, kGreeting };
  Fd fd;
  Await await = Await::kHello;
  int64_t accepted_ns = 0;
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

Status Acceptor::run(const std::atomic<bool>& stop) {
  while (!complete()) {
    if (stop.load()) return error(moecclAborted, "connecting to other ranks failed first");
    if (options_.deadline.passed()) {
      std::string missing;
      for (const auto& [rank, c] : coming_) {
        if (c.n_there == 0 || c.n_there < c.fds.size()) missing += format("{}{}", missing.empty() ? "" : ", ", rank);
      }
      return error(moecclTimeout,
                   "rank {} got no TCP connection from ranks {}: can they reach its interfaces (MOECCL_SOCKET_IFNAME), "
                   "and does no firewall close their ports?",
                   options_.rank, missing);
    }
    std::vector<pollfd> entries;
    for (const Fd& l : listeners_) entries.push_back({l.get(), POLLIN, 0});
    for (const auto& p : pending_) entries.push_back({p->fd.get(), POLLIN, 0});
    (void)::poll(entries.data(), entries.size(), std::min(kLookEveryMs, options_.deadline.remaining_ms()));
    const int64_t now = now_ns();
    for (size_t i = 0; i < pending_.size(); ++i) {
      Pending& p = *pending_[i];
      const bool stays = entries[listeners_.size() + i].revents == 0 ? now - p.accepted_ns < kGreetingNs : step(p);
      if (!stays) pending_[i].reset();
    }
    std::erase(pending_, nullptr);
    for (size_t i = 0; i < listeners_.size(); ++i) {
      if (entries[i].revents != 0) MOECCL_TRY(accept_all(entries[i].fd));
    }
  }
  return {};
}

Status Acceptor::accept_all(int listener) {
  while (pending_.size() < kMaxPending) {
    MOECCL_ASSIGN_OR_RETURN(Fd fd, driver::accept_now(listener));
    if (!fd) return {};
    auto p = std::make_unique<Pending>();
    p->fd = std::move(fd);
    p->accepted_ns = now_ns();
    pending_.push_back(std::move(p));
  }
  return {};
}

bool Acceptor::step(Pending& p) {
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
    if (!answer(p)) return false;
  }
}

// To a hello or a proof.
bool Acceptor::answer(Pending& p) {
  const bootstrap::HandshakeFrameView frame(p.in, bootstrap::kHandshakeFrameBytes);
  p.n_in = 0;
  if (p.await == Pending::Await::kProof) {
    p.await = Pending::Await::kGreeting;
    return p.handshake->on_proof(frame);
  }
  bootstrap::Nonce nonce;
  if (!random_bytes(&nonce, sizeof(nonce)).ok()) return false;
  const bootstrap::Party self = {bootstrap::Role::kLinkServer, options_.rank, options_.n_ranks};
  p.handshake = std::make_unique<bootstrap::ServerHandshake>(options_.key, self, nonce);
  const auto answer = p.handshake->on_hello(frame, bootstrap::Role::kLinkClient);
  if (answer.verdict == bootstrap::ServerHandshake::Verdict::kStranger) return false;
  // The socket of a new connection takes so little at once.
  const Result<driver::IoStep> sent = driver::send_now(p.fd.get(), answer.reply);
  p.await = Pending::Await::kProof;
  return sent.ok() && sent->n == answer.reply.size() &&
         answer.verdict == bootstrap::ServerHandshake::Verdict::kContinue;
}

// An authenticated peer's stream, with its greeting.
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
      g.n_streams == 0 || g.n_streams > kMaxStreams || g.stream >= g.n_streams) {
    log(LogLevel::kWarn, "rank {} refuses a connection of rank {}: it is not expected, or of another version",
        options_.rank, client.peer.rank);
    return;
  }
  Coming& c = at->second;
  if (c.fds.empty()) {
    c.fds.resize(g.n_streams);
    c.weights.resize(g.n_streams);
  }
  if (c.fds.size() != g.n_streams || c.fds[g.stream]) return;
  if (const Status st = prepare(p.fd.get(), options_); !st.ok()) {
    log(LogLevel::kWarn, "rank {} refuses a connection of rank {}: {}", options_.rank, client.peer.rank, st.message());
    return;
  }
  const Result<driver::SocketAddress> from = driver::peer_address(p.fd.get());
  if (c.where.empty() && from.ok()) c.where = from->str();
  c.fds[g.stream] = std::move(p.fd);
  c.weights[g.stream] = static_cast<double>(std::max<uint64_t>(1, g.mbit_per_s));
  ++c.n_there;
}

std::vector<TcpPeer> Acceptor::take() {
  std::vector<TcpPeer> peers;
  for (auto& [rank, c] : coming_) {
    TcpPeer peer;
    peer.rank = rank;
    peer.where = std::move(c.where);
    for (size_t i = 0; i < c.fds.size(); ++i) peer.streams.emplace_back(std::move(c.fds[i]), c.weights[i]);
    peers.push_back(std::move(peer));
  }
  return peers;
}

}  // namespace moeccl::transport::tcp
