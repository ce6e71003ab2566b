// SPDX-License-Identifier: Apache-2.0
#include "transport/tcp/mesh.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <set>
#include <thread>

#include "src/base/log.h"
#include "src/bootstrap/control.h"
#include "src/bootstrap/handshake.h"
#include "src/driver/port.h"
#include "src/driver/thread.h"
#include "transport/common/still_wanted.h"
#include "transport/tcp/acceptor.h"

namespace moeccl::transport::tcp {
namespace {

// If there is another way to the peer, one that does not answer is given up after this time.
constexpr int64_t kTryRailMs = 3000;
// If there is another way, a host that accepts connections has a quarter of the time that is left to shake hands. It
// accepts them while its rank is still busy, so this is long.
constexpr int kShakePart = 4;
constexpr int64_t kMostShakeMs = 60'000;  // where there is no limit to the time that is left
// An interface that this many hosts have not answered is used only where there is no other.
constexpr size_t kSilentHosts = 3;
// Tries for a connection that the other side drops before it is authenticated.
constexpr int kTries = 10;
// Tries for one that is not made at all go on for this time: a bond fails over, or a neighbour answers no ARP request.
constexpr int64_t kUnreachableMs = 30'000;
constexpr int64_t kRetryMs = 20, kMostRetryMs = 200;

// For the connections of one site. Unlike bbr, reno does not pace, for which a timer interrupts the sender at each
// packet; unlike cubic, it does not take a late acknowledgement for a queue. Every kernel offers it to every user
// (docs/decisions.md).
constexpr const char* kForNear = "reno";
// Over a longer distance its windows grow too slowly after a loss, and the system's own is better.
constexpr int64_t kNearUs = 500;

// Returns "eth0 10.0.0.1, ib0 10.1.0.1".
std::string text_of(std::span<const Nic> nics) {
  std::string all;
  for (const Nic& n : nics) all += format("{}{} {}", all.empty() ? "" : ", ", n.name, n.address.host());
  return all;
}

// Anything but a kernel's default was chosen for this network (dctcp) and stays.
bool is_default(const std::string& congestion) {
  return congestion == "cubic" || congestion == "bbr" || congestion == "reno";
}

}  // namespace

Status prepare(int fd, const MeshOptions& options) {
  MOECCL_TRY(driver::set_no_delay(fd));
  return driver::set_lost_after(fd, options.lost_after_ms);
}

Result<std::unique_ptr<Mesh>> Mesh::listen(const MeshOptions& options, std::vector<Nic> nics) {
  std::unique_ptr<Mesh> mesh(new Mesh(options));
  std::map<std::string, Status> failed;
  for (Nic& nic : nics) {
    nic.address.set_port(0);
    Result<Fd> listener = driver::listen_in(&nic.address, options.ports);
    if (!listener.ok()) {
      failed.emplace(nic.name, std::move(listener).status().with_context(format("interface {}", nic.name)));
      continue;
    }
    MOECCL_TRY(mesh->prepare_listener(listener->get()));
    mesh->listeners_.push_back(std::move(*listener));
    mesh->nics_.push_back(std::move(nic));
  }
  // One of an interface's addresses is enough: the kernel may not have checked a new IPv6 address yet.
  for (auto& [name, why] : failed) {
    if (std::none_of(mesh->nics_.begin(), mesh->nics_.end(), [&](const Nic& n) { return n.name == name; })) return why;
    log(LogLevel::kWarn, "rank {}: one address less: {}", options.rank, why.message());
  }
  return mesh;
}

// Must be called before any connection is there, see driver::set_congestion_control().
Status Mesh::prepare_listener(int fd) {
  if (options_.congestion == "system") return {};
  if (!options_.congestion.empty()) {
    congestion_ = options_.congestion;
    return driver::set_congestion_control(fd, congestion_).with_context("MOECCL_SOCKET_CONGESTION");
  }
  if (Result<std::string> name = driver::congestion_control(fd); name.ok()) system_congestion_ = std::move(*name);
  if (!is_default(system_congestion_)) return {};
  congestion_ = driver::set_congestion_control(fd, kForNear).ok() ? kForNear : "";
  return {};
}

// Called once connected, when the handshake's packets have shown the distance.
void Mesh::choose_congestion(const TcpPeer& peer) const {
  if (congestion_.empty() || system_congestion_.empty()) return;
  for (const Stream& s : peer.streams) {
    // Choosing the system's own needs no privilege.
    if (driver::least_round_trip_us(s.fd()) > kNearUs) (void)driver::set_congestion_control(s.fd(), system_congestion_);
  }
}

Status Mesh::shake_hands(uint32_t peer, Knocked* k) const {
  MOECCL_TRY(prepare(k->fd.get(), options_));
  bootstrap::Party self = {bootstrap::Role::kLinkClient, options_.rank, options_.n_ranks};
  self.exchanges_keys = options_.cipher != Cipher::kNone;
  MOECCL_ASSIGN_OR_RETURN(const bootstrap::Authenticated server,
                          bootstrap::client_handshake(k->fd.get(), options_.key, self, {bootstrap::Role::kLinkServer},
                                                      k->way.answered, options_.watch));
  if (server.peer.rank != peer || server.peer.n_ranks != options_.n_ranks) {
    return error(moecclInternalError, "rank {} of {} answers in the place of rank {}", server.peer.rank,
                 server.peer.n_ranks, peer);
  }
  k->keys = server.keys;
  return {};
}

// Connects and shakes hands. The way may be missing for a moment, and a port that many strangers know may drop this
// connection, too; then it tries again.
Result<Mesh::Knocked> Mesh::knock(uint32_t peer, const Way& way, bool* reached) const {
  const Deadline given_up = Deadline::earlier(way.until, Deadline::after_ms(kUnreachableMs));
  for (int64_t tries = 1, drops = 0;; ++tries) {
    Knocked k;
    k.way = way;
    Result<Fd> fd = driver::connect_to(way.to, way.until, {&way.from, congestion_, options_.watch});
    Status status = fd.status();
    if (fd.ok()) {
      *reached = true;
      k.fd = std::move(*fd);
      status = shake_hands(peer, &k);
      if (status.ok()) return k;
    }
    const bool again = fd.ok() ? ++drops < kTries : !given_up.passed();
    if (status.code() != moecclRemoteError || !again || !still_wanted(options_.watch).ok()) return status;
    std::this_thread::sleep_for(std::chrono::milliseconds(std::min(kRetryMs * tries, kMostRetryMs)));
  }
}

// RemoteError: the connection was dropped before the peer accepted it as its own.
Status Mesh::greet(uint32_t peer, Knocked* k, const StreamGreeting& greeting) const {
  bootstrap::Sealer sealer(k->keys.send);
  bootstrap::ControlHead head;
  const auto payload = as_bytes_of(greeting);
  head.type = kGreetingType;
  head.n_bytes = static_cast<uint32_t>(payload.size());
  head.digest = bootstrap::digest_of(payload);
  const bootstrap::ControlHeadBytes sealed = sealer.seal(head);
  MOECCL_TRY(driver::send_all(k->fd.get(), sealed, options_.deadline, options_.watch));
  MOECCL_TRY(driver::send_all(k->fd.get(), payload, options_.deadline, options_.watch));
  bootstrap::ControlHeadBytes answer;
  MOECCL_TRY(driver::recv_exact(k->fd.get(), answer, options_.deadline, options_.watch));
  bootstrap::Opener opener(k->keys.receive);
  MOECCL_ASSIGN_OR_RETURN(const bootstrap::ControlHead welcome, opener.open(answer, 0));
  const int cipher = welcome.type - kWelcomeType;
  const auto own = static_cast<int>(options_.cipher);
  if (cipher < 0 || cipher > own || (cipher == 0) != (own == 0)) {
    return error(moecclInternalError, "rank {} answers a greeting with a frame of type {}", peer, welcome.type);
  }
  k->cipher = static_cast<Cipher>(cipher);
  return {};
}

// Warns once for each interface that could carry much more than those that are used.
void Mesh::say_if_missed(uint32_t peer, std::span<const Nic> nics, std::span<const Rail> rails) {
  const std::optional<Rail> missed = missed_rail(nics_, nics, rails);
  if (!missed.has_value() || !missed_.insert(missed->own).second) return;
  const auto gbit = [](int64_t mbit_per_s) { return static_cast<double>(mbit_per_s) / 1e3; };
  log(LogLevel::kWarn,
      "rank {}: {} ({:g} Gbit/s) carries nothing to rank {}, but {} ({:g} Gbit/s) does: no route leads over it to {} "
      "there; give it one, or name the interfaces to use in MOECCL_SOCKET_IFNAME",
      options_.rank, nics_[missed->own].name, gbit(missed->mbit_per_s), peer, nics_[rails[0].own].name,
      gbit(rails[0].mbit_per_s), nics[missed->peer].name);
}

Result<TcpPeer> Mesh::connect_to(uint32_t peer, std::span<const Nic> nics) {
  const bool one_machine = peer < options_.one_machine.size() && options_.one_machine[peer];
  const auto leaves = [](const Nic& own, const driver::SocketAddress& to) {
    return driver::leaves_by(own.name, own.address, to).value_or(true);
  };
  std::vector<Rail> rails = choose_rails(nics_, nics, driver::source_address_towards, one_machine, leaves);
  if (rails.empty()) {
    return error(moecclRemoteError,
                 "no interface that this host offers ({}) has a route to one that rank {} offers ({}): set "
                 "MOECCL_SOCKET_IFNAME on all hosts to interfaces that reach each other",
                 text_of(nics_), peer, text_of(nics));
  }
  say_if_missed(peer, nics, rails);
  const auto n_used = std::count_if(rails.begin(), rails.end(), [](const Rail& rail) { return !rail.spare; });
  // Each rank of each host would wait in vain again.
  const auto is_silent = [&](const Rail& rail) {
    const std::set<std::string>& hosts = silent_[rail.own];
    return hosts.count(nics[rail.peer].address.host()) > 0 || hosts.size() >= kSilentHosts;
  };
  std::stable_partition(rails.begin(), rails.end(), [&](const Rail& rail) { return !is_silent(rail); });
  TcpPeer made;
  made.rank = peer;
  std::vector<Knocked> doors;
  Status last;
  // If none answers soon, the one that could be connected to gets all the time that is left. If there is none, the best
  // one is tried again.
  std::optional<size_t> slow;
  const size_t n_tries = rails.size() + (rails.size() > 1 ? 1 : 0);
  for (size_t at = 0; at < n_tries; ++at) {
    const bool last_try = at + 1 == n_tries;
    const Rail& rail = rails[at < rails.size() ? at : slow.value_or(0)];
    if (!doors.empty() && (rail.spare || is_silent(rail) || at == rails.size())) continue;
    const std::string to = nics[rail.peer].address.str();
    Way way{nics_[rail.own].address, nics[rail.peer].address, rail.mbit_per_s, options_.deadline, options_.deadline};
    if (!last_try) {
      way.until = Deadline::earlier(way.until, Deadline::after_ms(kTryRailMs));
      way.answered = Deadline::after_ms(std::min(options_.deadline.left_ms() / kShakePart, kMostShakeMs));
    } else if (at > 0 && !slow.has_value()) {
      way.until = Deadline::earlier(way.until, Deadline::after_ms(kUnreachableMs));
    }
    const size_t before = doors.size();
    const uint32_t most = kMaxStreams / std::max(1u, static_cast<uint32_t>(n_used));
    for (uint32_t i = streams_for(rail, options_.streams_per_rail, most); i > 0; --i) {
      bool reached = false;
      Result<Knocked> k = knock(peer, way, &reached);
      if (!k.ok()) {
        MOECCL_TRY(still_wanted(options_.watch));
        last = std::move(k).status();
        if (reached && !slow.has_value()) slow = at;
        if (rails.size() > 1 && !reached && silent_[rail.own].insert(nics[rail.peer].address.host()).second)
          log(LogLevel::kWarn, "rank {}: {} does not reach {} of rank {}: {}", options_.rank,
              nics_[rail.own].address.str(), to, peer, last.message());
        doors.resize(before);
        break;
      }
      doors.push_back(std::move(*k));
    }
    if (doors.size() > before && made.where.empty()) made.where = to;
    if (doors.size() > before) made.mbit_per_s += rail.mbit_per_s;
  }
  if (doors.empty()) {
    const bool unanswered = last.code() == moecclRemoteError || last.code() == moecclTimeout;
    return error(last.code(), "connecting to rank {}: {}{}", peer, last.message(),
                 !unanswered ? ""
                 : slow.has_value()
                     ? ": its host accepts connections, but no rank answers: is its process stopped?"
                     : ": can this host reach that address (MOECCL_SOCKET_IFNAME on both), and does no firewall close "
                       "its port (MOECCL_PORT_RANGE)?");
  }
  for (size_t i = 0; i < doors.size(); ++i) {
    Knocked& k = doors[i];
    const StreamGreeting greeting{kWireVersion, static_cast<uint16_t>(i), static_cast<uint16_t>(doors.size()),
                                  static_cast<uint16_t>(options_.cipher), static_cast<uint64_t>(k.way.mbit_per_s)};
    Status status = greet(peer, &k, greeting);
    for (int tries = 1; status.code() == moecclRemoteError && tries < kTries; ++tries) {
      MOECCL_TRY(still_wanted(options_.watch));
      k.way.until = k.way.answered = options_.deadline;  // it has answered before
      bool reached = false;
      Result<Knocked> again = knock(peer, k.way, &reached);
      status = again.status();
      if (!again.ok()) break;
      k = std::move(*again);
      status = greet(peer, &k, greeting);
    }
    if (!status.ok()) return std::move(status).with_context(format("connecting to rank {}", peer));
    made.streams.emplace_back(std::move(k.fd), static_cast<double>(std::max<uint64_t>(1, greeting.mbit_per_s)),
                              RecordKeys{k.cipher, k.keys.send, k.keys.receive});
    made.cipher = k.cipher;
  }
  return made;
}

Result<std::vector<TcpPeer>> Mesh::connect(const std::map<uint32_t, std::vector<Nic>>& peers) {
  std::vector<uint32_t> expected;
  for (const auto& [rank, nics] : peers) {
    if (rank > options_.rank) expected.push_back(rank);
  }
  std::atomic<bool> stop{false};
  Acceptor acceptor(options_, listeners_, std::move(expected));
  Status accepted;
  MOECCL_ASSIGN_OR_RETURN(std::thread thread, driver::start_thread("moeccl-accept", [&] {
                            accepted = contained([&] { return acceptor.run(stop); });
                          }));
  std::vector<TcpPeer> made;
  Status connected = contained([&]() -> Status {  // the thread is joined in any case
    for (const auto& [rank, nics] : peers) {
      if (rank > options_.rank) continue;
      MOECCL_ASSIGN_OR_RETURN(TcpPeer peer, connect_to(rank, nics));
      made.push_back(std::move(peer));
    }
    return {};
  });
  if (!connected.ok()) stop.store(true);
  thread.join();
  MOECCL_TRY(std::move(connected));
  MOECCL_TRY(accepted);
  for (TcpPeer& p : acceptor.take()) made.push_back(std::move(p));
  for (TcpPeer& p : made) {
    p.may_change_congestion = options_.congestion.empty() && is_default(system_congestion_);
    if (p.may_change_congestion) choose_congestion(p);
  }
  listeners_.clear();
  return made;
}

}  // namespace moeccl::transport::tcp
