// SPDX-License-Identifier: Apache-2.0
#include "transport/common/rails.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace moeccl::transport {
namespace {

constexpr int64_t kSlowest = 4;  // a rail may be this many times slower than the best one
constexpr size_t kMaxName = 64;

// NCCL's rule: a list of prefixes. "=" before it, or before one of its names, makes them exact; "^" at the beginning
// chooses all other interfaces.
struct Filter {
  struct Name {
    std::string_view text;
    bool exact = false;
    bool matches(const std::string& name) const { return exact ? name == text : name.starts_with(text); }
  };
  bool all_but = false;
  std::vector<Name> names;

  explicit Filter(std::string_view text) {
    const auto take = [](std::string_view* from, char mark) {
      const bool there = from->starts_with(mark);
      if (there) from->remove_prefix(1);
      return there;
    };
    all_but = take(&text, '^');
    const bool all_exact = take(&text, '=');
    for (size_t at = 0; at < text.size();) {
      const size_t end = std::min(text.find(',', at), text.size());
      std::string_view name = text.substr(at, end - at);
      const bool exact = take(&name, '=') || all_exact;
      if (!name.empty()) names.push_back({name, exact});
      at = end + 1;
    }
  }
  bool names_it(const std::string& name) const {
    return std::any_of(names.begin(), names.end(), [&](const Name& n) { return n.matches(name); });
  }
  bool takes(const driver::Interface& i) const {
    if (names.empty()) return !i.loopback;
    return all_but ? !i.loopback && !names_it(i.name) : names_it(i.name);
  }
};

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

}  // namespace

Result<std::vector<Nic>> choose_nics(std::span<const driver::Interface> interfaces, const std::string& filter,
                                     const std::string& met_at) {
  const Filter chosen(filter);
  std::vector<Nic> nics;
  std::vector<std::string> seen;
  const bool v6_first = met_at.find(':') != std::string::npos;
  for (const bool v4 : {!v6_first, v6_first}) {
    for (const driver::Interface& i : interfaces) {
      if (std::find(seen.begin(), seen.end(), i.name) == seen.end()) seen.push_back(i.name);
      const bool known = std::any_of(nics.begin(), nics.end(),
                                     [&](const Nic& n) { return n.name == i.name && is_v4(n.address) == v4; });
      if (is_v4(i.address) != v4 || known || !chosen.takes(i)) continue;
      nics.push_back({i.name, i.address, i.prefix_bits, i.mbit_per_s, i.tunnel, i.wire});
    }
  }
  keep_best(met_at, &nics);
  if (!nics.empty()) return nics;
  std::string all;
  for (const std::string& name : seen) all += (all.empty() ? "" : ", ") + name;
  if (all.empty()) all = "none";
  if (!filter.empty()) {
    return error(moecclInvalidArgument,
                 "MOECCL_SOCKET_IFNAME (else NCCL_SOCKET_IFNAME): \"{}\" leaves no interface that is up; there are {}",
                 filter, all);
  }
  return error(moecclUnsupported,
               "ranks run on several hosts, but no network interface besides loopback is up here (there are {})", all);
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
  std::vector<Rail> rails;
  std::vector<bool> used_own(own.size()), used_peer(peer.size());
  std::set<std::string> own_wires, peer_wires;
  const auto add = [&](const Rail& rail) {
    rails.push_back(rail);
    used_own[rail.own] = used_peer[rail.peer] = true;
    if (rail.spare) return;
    const std::string &here = wire_of(own[rail.own]), &there = wire_of(peer[rail.peer]);
    rails.back().spare = own_wires.count(here) > 0 || peer_wires.count(there) > 0;
    if (rails.back().spare) return;
    own_wires.insert(here);
    peer_wires.insert(there);
  };
  const auto leads_nowhere = [&](const Nic& n) { return !one_machine && has_address(own, n); };
  // The kernel sends to a network by the first interface there unless its rules say otherwise.
  const auto leaves_by = [&](const Nic& nic, const Nic& to) {
    const auto beside = [&](const Nic& n) { return wire_of(n) != wire_of(nic) && share_network(n, nic); };
    return !leaves || one_machine || std::none_of(own.begin(), own.end(), beside) || leaves(nic, to.address);
  };
  std::set<bool> families;
  std::vector<Rail> elsewhere;  // their packets leave by another interface
  for (uint32_t o = 0; o < own.size(); ++o) {
    for (uint32_t p = 0; p < peer.size() && !used_own[o]; ++p) {
      if (used_peer[p] || leads_nowhere(peer[p]) || !share_network(own[o], peer[p])) continue;
      const Rail rail{o, p, rate_between(own[o], peer[p]), !leaves_by(own[o], peer[p])};
      families.insert(is_v4(own[o].address));
      if (rail.spare)
        elsewhere.push_back(rail);
      else
        add(rail);
    }
  }
  for (const Rail& r : elsewhere)
    if (!used_own[r.own] && !used_peer[r.peer]) add(r);
  const auto is_tunnel = [&](const Rail& r) { return own[r.own].tunnel || peer[r.peer].tunnel; };
  int64_t shared = 0;
  for (const Rail& r : rails) shared = std::max(shared, r.mbit_per_s);
  std::vector<Rail> routed;
  for (uint32_t p = 0; p < peer.size(); ++p) {
    if (used_peer[p] || leads_nowhere(peer[p])) continue;
    const Result<driver::SocketAddress> source = route(peer[p].address);
    if (!source.ok()) continue;
    for (uint32_t o = 0; o < own.size(); ++o) {
      if (used_own[o] || !same_address(own[o].address, *source)) continue;
      Rail rail{o, p, rate_between(own[o], peer[p])};
      // An interface of unknown rate is often a tunnel, which is no faster than what it leads through.
      const bool faster = known_rates(own[o], peer[p]) && rail.mbit_per_s > shared;
      rail.spare = shared != 0 && (!faster || is_tunnel(rail));
      if (!rail.spare || families.count(is_v4(own[o].address)) == 0) routed.push_back(rail);
    }
  }
  std::stable_sort(routed.begin(), routed.end(), [&](const Rail& a, const Rail& b) {
    if (is_tunnel(a) != is_tunnel(b)) return is_tunnel(b);
    return a.mbit_per_s != b.mbit_per_s ? faster_rail(a, b) : a.own < b.own;
  });
  for (Rail& r : routed) {
    r.spare = r.spare || (!rails.empty() && (is_tunnel(r) || !known_rates(own[r.own], peer[r.peer])));
    add(r);
  }
  std::stable_sort(rails.begin(), rails.end(),
                   [](const Rail& a, const Rail& b) { return a.spare != b.spare ? b.spare : faster_rail(a, b); });
  for (Rail& r : rails) r.spare = r.spare || r.mbit_per_s < rails.front().mbit_per_s / kSlowest;
  return rails;
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
