// SPDX-License-Identifier: Apache-2.0
#include "transport/common/rails.h"

#include <algorithm>
#include <set>

#include "src/base/name_list.h"

namespace moeccl::transport {
namespace {

constexpr int64_t kSlowest = 4;  // a rail may be this many times slower than the best one
constexpr size_t kMaxName = 64;

bool takes(const NameList& list, const driver::Interface& i) {
  const bool may_be_loopback = !list.names.empty() && !list.all_but;
  return list.chooses(i.name) && (may_be_loopback || !i.loopback);
}

bool same_address(const driver::SocketAddress& a, const driver::SocketAddress& b) {
  return std::ranges::equal(a.host_bytes(), b.host_bytes());
}

// An address that both hosts have, such as a container bridge's, does not lead to the other host.
bool has_address(std::span<const Nic> nics, const Nic& of) {
  return std::any_of(nics.begin(), nics.end(), [&](const Nic& n) { return same_address(n.address, of.address); });
}

bool is_v4(const driver::SocketAddress& a) { return a.host_bytes().size() == 4; }
const std::string& wire_of(const Nic& n) { return n.wire.empty() ? n.name : n.wire; }
bool share_network(const Nic& a, const Nic& b) {
  return a.prefix_bits == b.prefix_bits && driver::same_network(a.address, b.address, a.prefix_bits);
}

int64_t rate_of(const Nic& n) { return n.mbit_per_s > 0 ? n.mbit_per_s : kUnknownMbit; }
bool known_rates(const Nic& a, const Nic& b) { return a.mbit_per_s > 0 && b.mbit_per_s > 0; }
// If only one of them is known, it counts.
int64_t rate_between(const Nic& a, const Nic& b) {
  if (known_rates(a, b)) return std::min(a.mbit_per_s, b.mbit_per_s);
  return a.mbit_per_s > 0 ? a.mbit_per_s : rate_of(b);
}
bool faster_rail(const Rail& a, const Rail& b) { return a.mbit_per_s > b.mbit_per_s; }

// Reduces the list to kMaxNics interfaces and keeps its order.
void keep_best(const std::string& met_at, std::vector<Nic>* nics) {
  std::vector<const Nic*> best;
  for (const Nic& n : *nics) best.push_back(&n);
  const auto met = [&](const Nic* n) { return n->address.host() == met_at; };
  std::stable_sort(best.begin(), best.end(),
                   [&](const Nic* a, const Nic* b) { return met(a) != met(b) ? met(a) : rate_of(*a) > rate_of(*b); });
  std::set<std::string> kept;
  for (const Nic* n : best) {
    if (kept.size() < kMaxNics) kept.insert(n->name);
  }
  std::erase_if(*nics, [&](const Nic& n) { return kept.count(n.name) == 0; });
}

class RailChoice {
 public:
  RailChoice(std::span<const Nic> own, std::span<const Nic> peer, const Route& route, bool one_machine,
             const Leaves& leaves)
      : own_(own),
        peer_(peer),
        route_(route),
        one_machine_(one_machine),
        leaves_(leaves),
        used_own_(own.size()),
        used_peer_(peer.size()) {}

  std::vector<Rail> choose() {
    add_networks();
    add_routes();
    std::stable_sort(rails_.begin(), rails_.end(),
                     [](const Rail& a, const Rail& b) { return a.spare != b.spare ? b.spare : faster_rail(a, b); });
    for (Rail& r : rails_) r.spare = r.spare || is_slow(r);
    return std::move(rails_);
  }

 private:
  bool leads_nowhere(const Nic& n) const { return !one_machine_ && has_address(own_, n); }
  bool is_tunnel(const Rail& r) const { return own_[r.own].tunnel || peer_[r.peer].tunnel; }
  bool is_known(const Rail& r) const { return known_rates(own_[r.own], peer_[r.peer]); }

  // The causes for which a rail is spare, as the header lists them.

  bool shares_wire(const Rail& r) const {
    return own_wires_.contains(wire_of(own_[r.own])) || peer_wires_.contains(wire_of(peer_[r.peer]));
  }
  // The kernel sends to a network by the first interface there unless its rules say otherwise.
  bool leaves_by_another(const Rail& r) const {
    const Nic& nic = own_[r.own];
    const auto beside = [&](const Nic& n) { return wire_of(n) != wire_of(nic) && share_network(n, nic); };
    return leaves_ && !one_machine_ && std::any_of(own_.begin(), own_.end(), beside) &&
           !leaves_(nic, peer_[r.peer].address);
  }
  // An interface of unknown rate is often a tunnel, which is no faster than what it leads through.
  bool is_no_faster_than_network(const Rail& r) const {
    return network_mbit_ != 0 && (!is_known(r) || r.mbit_per_s <= network_mbit_ || is_tunnel(r));
  }
  bool is_doubtful(const Rail& r) const { return !rails_.empty() && (is_tunnel(r) || !is_known(r)); }
  bool is_slow(const Rail& r) const { return r.mbit_per_s < rails_.front().mbit_per_s / kSlowest; }

  void add(Rail rail) {
    rail.spare = rail.spare || shares_wire(rail);
    rails_.push_back(rail);
    used_own_[rail.own] = used_peer_[rail.peer] = true;
    if (rail.spare) return;
    own_wires_.insert(wire_of(own_[rail.own]));
    peer_wires_.insert(wire_of(peer_[rail.peer]));
  }

  void add_networks() {
    std::vector<Rail> last;
    for (uint32_t o = 0; o < own_.size(); ++o) {
      for (uint32_t p = 0; p < peer_.size() && !used_own_[o]; ++p) {
        if (used_peer_[p] || leads_nowhere(peer_[p]) || !share_network(own_[o], peer_[p])) continue;
        Rail rail{o, p, rate_between(own_[o], peer_[p])};
        rail.spare = leaves_by_another(rail);
        families_.insert(is_v4(own_[o].address));
        if (rail.spare)
          last.push_back(rail);
        else
          add(rail);
      }
    }
    for (const Rail& r : last)
      if (!used_own_[r.own] && !used_peer_[r.peer]) add(r);
    for (const Rail& r : rails_) network_mbit_ = std::max(network_mbit_, r.mbit_per_s);
  }

  void add_routes() {
    std::vector<Rail> routed;
    for (uint32_t p = 0; p < peer_.size(); ++p) {
      if (used_peer_[p] || leads_nowhere(peer_[p])) continue;
      const Result<driver::SocketAddress> source = route_(peer_[p].address);
      if (!source.ok()) continue;
      for (uint32_t o = 0; o < own_.size(); ++o) {
        if (used_own_[o] || !same_address(own_[o].address, *source)) continue;
        Rail rail{o, p, rate_between(own_[o], peer_[p])};
        rail.spare = is_no_faster_than_network(rail);
        if (!rail.spare || !families_.contains(is_v4(own_[o].address))) routed.push_back(rail);
      }
    }
    std::stable_sort(routed.begin(), routed.end(), [&](const Rail& a, const Rail& b) {
      if (is_tunnel(a) != is_tunnel(b)) return is_tunnel(b);
      return a.mbit_per_s != b.mbit_per_s ? faster_rail(a, b) : a.own < b.own;
    });
    for (Rail& r : routed) {
      r.spare = r.spare || is_doubtful(r);
      add(r);
    }
  }

  std::span<const Nic> own_, peer_;
  const Route& route_;
  const bool one_machine_;
  const Leaves& leaves_;
  std::vector<Rail> rails_;
  std::vector<bool> used_own_, used_peer_;
  std::set<std::string> own_wires_, peer_wires_;  // of rails that are not spare
  std::set<bool> families_;                       // is_v4() of the networks that both hosts are in
  int64_t network_mbit_ = 0;                      // the fastest rail by a network that both are in; 0: none
};

}  // namespace

Result<std::vector<Nic>> choose_nics(std::span<const driver::Interface> interfaces, const std::string& filter,
                                     const std::string& met_at) {
  const NameList chosen(filter);
  std::vector<Nic> nics;
  std::vector<std::string> seen;
  const bool v6_first = met_at.find(':') != std::string::npos;
  for (const bool v4 : {!v6_first, v6_first}) {
    for (const driver::Interface& i : interfaces) {
      if (std::find(seen.begin(), seen.end(), i.name) == seen.end()) seen.push_back(i.name);
      if (is_v4(i.address) != v4 || !takes(chosen, i)) continue;
      const auto known = std::find_if(nics.begin(), nics.end(),
                                      [&](const Nic& n) { return n.name == i.name && is_v4(n.address) == v4; });
      Nic nic{i.name, i.address, i.prefix_bits, i.mbit_per_s, i.tunnel, i.wire};
      if (known == nics.end()) {
        nics.push_back(std::move(nic));
      } else if (i.address.host() == met_at && i.prefix_bits <= known->prefix_bits) {
        *known = std::move(nic);
      }
    }
  }
  keep_best(met_at, &nics);
  if (!nics.empty()) return nics;
  std::string all;
  for (const std::string& name : seen) all += (all.empty() ? "" : ", ") + name;
  if (all.empty()) all = "none";
  if (!filter.empty()) {
    return error(
        moecclInvalidArgument,
        "MOECCL_SOCKET_IFNAME (else NCCL_SOCKET_IFNAME): \"{}\" leaves no interface that is up and has an address "
        "(link-local ones of IPv6 do not count); there are {}",
        filter, all);
  }
  return error(moecclUnsupported,
               "ranks run on several hosts, but no network interface besides loopback is up here and has an address "
               "(link-local ones of IPv6 do not count; there are {})",
               all);
}

void write_nics(std::span<const Nic> nics, Writer& out) {
  out.u8(static_cast<uint8_t>(nics.size()));
  for (const Nic& n : nics) {
    out.string(n.name);
    out.bytes(n.address.host_bytes());
    out.u16(n.address.port());
    out.u8(static_cast<uint8_t>(n.prefix_bits));
    out.i64(n.mbit_per_s);
    out.u8(n.tunnel ? 1 : 0);
    out.string(n.wire);
  }
}

std::vector<Nic> read_nics(Reader& in) {
  std::vector<Nic> nics;
  const size_t n = in.u8();
  for (size_t i = 0; i < n && n <= 2 * kMaxNics; ++i) {
    Nic nic;
    nic.name = in.string(kMaxName);
    const auto host = in.bytes(16);
    Result<driver::SocketAddress> address = driver::ip_address(host, in.u16());
    nic.prefix_bits = in.u8();
    nic.mbit_per_s = std::max<int64_t>(0, in.i64());
    nic.tunnel = in.u8() != 0;
    nic.wire = in.string(kMaxName);
    if (!in.ok() || !address.ok()) return {};
    nic.address = *address;
    nics.push_back(std::move(nic));
  }
  return nics;
}

std::vector<Rail> choose_rails(std::span<const Nic> own, std::span<const Nic> peer, const Route& route,
                               bool one_machine, const Leaves& leaves) {
  return RailChoice(own, peer, route, one_machine, leaves).choose();
}

std::optional<Rail> missed_rail(std::span<const Nic> own, std::span<const Nic> peer, std::span<const Rail> rails) {
  std::optional<Rail> missed;
  const auto used = [&](std::span<const Nic> nics, uint32_t Rail::*end, uint32_t nic) {
    return std::any_of(rails.begin(), rails.end(),
                       [&](const Rail& r) { return !r.spare && wire_of(nics[r.*end]) == wire_of(nics[nic]); });
  };
  int64_t best = 0;
  for (const Rail& r : rails) best = std::max(best, r.spare ? 0 : r.mbit_per_s);
  if (best == 0) return missed;  // a spare one is used
  for (uint32_t o = 0; o < own.size(); ++o) {
    for (uint32_t p = 0; p < peer.size(); ++p) {
      if (used(own, &Rail::own, o) || used(peer, &Rail::peer, p) || has_address(own, peer[p]) ||
          has_address(peer, own[o]))
        continue;
      const Rail rail{o, p, rate_between(own[o], peer[p])};
      if (!known_rates(own[o], peer[p]) || rail.mbit_per_s / kSlowest <= best) continue;
      if (!missed.has_value() || rail.mbit_per_s > missed->mbit_per_s) missed = rail;
    }
  }
  return missed;
}

uint32_t streams_for(const Rail& rail, int32_t wanted, uint32_t most) {
  const uint32_t by_rate = rail.mbit_per_s >= 80'000 ? 4 : rail.mbit_per_s >= 40'000 ? 2 : 1;
  return std::clamp(wanted > 0 ? static_cast<uint32_t>(wanted) : by_rate, 1u, std::max(1u, most));
}

}  // namespace moeccl::transport
