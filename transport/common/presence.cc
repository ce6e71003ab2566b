// SPDX-License-Identifier: Apache-2.0
#include "transport/common/presence.h"

#include <algorithm>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/driver/interface.h"
#include "src/driver/port.h"
#include "src/driver/process.h"
#include "transport/common/rails.h"

namespace moeccl::transport {
namespace {

// An answer takes a round trip. Hosts without power give none, and are asked again later.
constexpr int64_t kAnswerMs = 50;
constexpr size_t kAskAtOnce = 64;  // each takes a descriptor
constexpr int kMostAnswers = 256;  // at a time
constexpr uint32_t kRounds = 5;    // of meet()
constexpr int64_t kOnceMs = 200;   // an answer that goes into a message
// A peer that acknowledges nothing for so long may be without its process. A queue may delay an acknowledgement longer:
// 16 MiB to each of 20 peers take 270 ms at 10 Gbit/s. The peer is then asked in vain, and its answer says that it
// lives.
constexpr int64_t kSilentNs = 250'000'000, kAskEveryNs = 250'000'000;

// Returns the address where ranks of other hosts can reach this one.
Result<std::string> own_address(const NetworkOptions& o, const Env& settings) {
  if (settings.socket_ifname.empty()) {
    if (!o.met_at.empty()) return o.met_at;
    // The ranks have met over a UNIX socket or over loopback.
    const bool one_machine = o.same_network.size() == o.n_ranks() &&
                             std::all_of(o.same_network.begin(), o.same_network.end(), [](bool same) { return same; });
    if (one_machine) return std::string("127.0.0.1");
  }
  MOECCL_ASSIGN_OR_RETURN(const std::vector<driver::Interface> interfaces, driver::interfaces());
  MOECCL_ASSIGN_OR_RETURN(const std::vector<Nic> nics, choose_nics(interfaces, settings.socket_ifname, o.met_at));
  return nics[0].address.host();
}

Result<Fd> listen(const NetworkOptions& o, const Env& settings, driver::SocketAddress* at) {
  MOECCL_ASSIGN_OR_RETURN(const std::string host, own_address(o, settings));
  MOECCL_ASSIGN_OR_RETURN(*at, driver::parse_ip_address(host));
  return driver::listen_in(at, settings.port_range);
}

// Only the host itself says so. What fails at this end, such as a descriptor that is not to be had, says nothing.
bool refused(const driver::SocketAddress& address, Deadline deadline) {
  bool nobody = false;
  driver::ConnectOptions options;
  options.nobody_listens = &nobody;
  (void)driver::connect_to(address, deadline, options);
  return nobody;
}

}  // namespace

Presence Presence::open(const NetworkOptions& options, const Env& settings) {
  Presence made;
  driver::SocketAddress at;
  Result<Fd> listener = listen(options, settings, &at);
  if (listener.ok()) {
    made.listener_ = std::move(*listener);
    made.address_ = at.str();
  } else {
    log(LogLevel::kInfo, "rank {} cannot be asked after by ranks of other hosts: {}", options.rank,
        listener.status().message());
  }
  return made;
}

bool Presence::answer() const {
  for (int i = 0; i < kMostAnswers; ++i) {
    const Result<Fd> asks = driver::accept_now(listener_.get());
    if (!asks.ok() || !asks.value()) return asks.ok();
  }
  return true;
}

void RollCall::add(uint32_t rank, const std::string& address, bool same_network) {
  const Result<driver::SocketAddress> at = driver::parse_ip_address(address);
  if (!at.ok() || at->port() == 0) return;
  const auto [own, is_new] = is_own_.try_emplace(at->host());
  if (is_new) own->second = driver::is_local_address(*at);
  if (own->second) {
    const auto listens = [&] {
      return driver::ask_all(std::span(&*at, 1), Deadline::after_ms(kAnswerMs))[0] == driver::Answer::kListens;
    };
    if (!same_network || !listens()) {
      log(LogLevel::kInfo,
          "this rank does not ask whether the process of rank {} lives, because {} is an address of its own host too: "
          "its death may be noticed late",
          rank, at->host());
      return;
    }
  }
  peers_.insert_or_assign(rank, Peer{*at, at->host()});
}

std::vector<driver::Answer> RollCall::ask(std::span<const uint32_t> ranks) {
  std::vector<driver::SocketAddress> at;
  for (const uint32_t rank : ranks) at.push_back(peers_.at(rank).address);
  std::vector<driver::Answer> answers = driver::ask_all(at, Deadline::after_ms(kAnswerMs));
  for (size_t i = 0; i < ranks.size(); ++i)
    if (answers[i] == driver::Answer::kListens) has_answered_.insert(peers_.at(ranks[i]).host);
  return answers;
}

std::vector<uint32_t> RollCall::one_of_each_unheard(uint32_t own_rank) const {
  std::map<std::string, std::vector<uint32_t>> ranks_at;
  for (const auto& [rank, peer] : peers_)
    if (!has_answered_.contains(peer.host)) ranks_at[peer.host].push_back(rank);
  std::vector<uint32_t> one_of_each;
  for (const auto& [host, ranks] : ranks_at) one_of_each.push_back(ranks[(own_rank + round_) % ranks.size()]);
  return one_of_each;
}

bool RollCall::meet(uint32_t own_rank) {
  if (round_ == kRounds) return false;
  if (to_ask_.empty()) to_ask_ = one_of_each_unheard(own_rank);
  const size_t n = std::min(to_ask_.size(), kAskAtOnce);
  (void)ask(std::span(to_ask_).last(n));
  to_ask_.resize(to_ask_.size() - n);
  if (!to_ask_.empty()) return true;
  if (++round_ < kRounds) return false;
  for (const uint32_t rank : one_of_each_unheard(own_rank)) {
    log(LogLevel::kInfo,
        "this rank cannot ask whether the processes at {} live, as none of them answers (rank {} listens at {}): their "
        "deaths may be noticed late; let the firewall pass all of MOECCL_PORT_RANGE",
        peers_.at(rank).host, rank, peers_.at(rank).address.str());
  }
  return false;
}

std::vector<uint32_t> RollCall::gone(std::span<const uint32_t> silent) {
  std::vector<uint32_t> asked;
  for (size_t i = 0; i < silent.size() && asked.size() < kAskAtOnce; ++i, ++next_) {
    const uint32_t rank = silent[next_ % silent.size()];
    if (peers_.contains(rank)) asked.push_back(rank);
  }
  if (asked.size() < kAskAtOnce) ++next_;  // another one is first the next time, lest the time never suffice for some
  const std::vector<driver::Answer> answers = ask(asked);
  const Deadline deadline = Deadline::after_ms(kAnswerMs);
  std::vector<uint32_t> ended;
  for (size_t i = 0; i < asked.size(); ++i) {
    const Peer& peer = peers_.at(asked[i]);
    if (answers[i] == driver::Answer::kNobody && has_answered_.contains(peer.host) && refused(peer.address, deadline))
      ended.push_back(asked[i]);
  }
  return ended;
}

RollCall RollCall::of(const NetworkOptions& options, std::span<const std::string> addresses) {
  RollCall calls;
  std::set<std::string> here;  // the ports of this host's ranks, which no other rank can have
  for (uint32_t r = 0; r < options.n_ranks(); ++r)
    if (!options.remote(r)) here.insert(addresses[r]);
  const bool known = driver::host_identity().network() != 0;  // else same_network is a guess (MOECCL_HOST_ID)
  for (uint32_t r = 0; r < options.n_ranks(); ++r) {
    const bool shares = known && r < options.same_network.size() && options.same_network[r];
    if (options.remote(r) && !here.contains(addresses[r])) calls.add(r, addresses[r], shares);
  }
  return calls;
}

bool Questions::due(int64_t now) {
  if (now - noted_at_ns_ < kAskEveryNs) return false;
  noted_at_ns_ = now;
  return true;
}

bool Questions::too_long(int64_t since_ns, int64_t now) { return since_ns != 0 && now - since_ns > kSilentNs; }

void Questions::note(uint32_t rank, int64_t since_ns, int64_t now) {
  if (too_long(since_ns, now)) silent_.push_back(rank);
}

std::vector<uint32_t> Questions::ask(uint32_t own_rank) {
  if (const int64_t now = now_ns(); now >= meets_at_ns_) {
    meets_ = peers_.meet(own_rank);
    meets_at_ns_ = meets_ ? 0 : now + kAskEveryNs;
  }
  if (silent_.empty()) return {};
  std::vector<uint32_t> gone = peers_.gone(silent_);
  silent_.clear();
  return gone;
}

Status process_gone(const std::string& where) {
  return error(moecclRemoteError,
               "its process at {} has ended, or has destroyed its communicator: it acknowledges nothing, and its host "
               "says that the rank's port is closed",
               where);
}

std::string why_silent(const std::string& address, const std::string& if_it_lives) {
  const Result<driver::SocketAddress> at = driver::parse_ip_address(address);
  if (!at.ok() || at->port() == 0) return {};
  switch (driver::ask_all(std::span(&*at, 1), Deadline::after_ms(kOnceMs))[0]) {
    case driver::Answer::kListens:
      return format("its process exists, and its host answers at {}: {}", address, if_it_lives);
    case driver::Answer::kNobody:
      if (!refused(*at, Deadline::after_ms(kOnceMs))) break;  // this host has no route, or no descriptor left
      return format("its host refuses connections to {}: its process has ended, or a firewall refuses them", address);
    case driver::Answer::kSilent:
      break;
  }
  return {};
}

}  // namespace moeccl::transport
