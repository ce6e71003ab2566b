// SPDX-License-Identifier: Apache-2.0
// Chooses the network interfaces that carry the data between two hosts. All functions are pure; the route lookup is
// passed in.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/wire.h"
#include "src/driver/interface.h"

namespace moeccl::transport {

// An address of an interface that a rank offers, with the port on which it listens there.
struct Nic {
  std::string name;
  driver::SocketAddress address;
  uint32_t prefix_bits = 0;
  int64_t mbit_per_s = 0;  // 0: unknown
  bool tunnel = false;     // it leads through another interface
  std::string wire = {};   // see driver::Interface
};
inline constexpr size_t kMaxNics = 8;  // interfaces; each has at most one address of each family here
// The rate of an interface that does not know its own. Those of virtual machines (virtio) are seldom slower.
inline constexpr int64_t kUnknownMbit = 10'000;

// Chooses an IPv4 and an IPv6 address of each interface, those of the family of `met_at` first (IPv4 if it is empty),
// of at most kMaxNics interfaces. `filter` is MOECCL_SOCKET_IFNAME. Loopback is chosen only by name. The address
// `met_at` is chosen before others of its interface, unless its network is smaller (a service's address has a network
// of its own), and its interface before faster ones, because other hosts see it. Returns InvalidArgument for a filter
// that leaves no interface, Unsupported when there is none without a filter.
Result<std::vector<Nic>> choose_nics(std::span<const driver::Interface> interfaces, const std::string& filter,
                                     const std::string& met_at = {});

void write_nics(std::span<const Nic> nics, Writer& out);
// Returns an empty list for malformed input.
std::vector<Nic> read_nics(Reader& in);

struct Rail {
  uint32_t own = 0, peer = 0;  // indices of the two hosts' Nics
  int64_t mbit_per_s = 0;      // rate of the slower of the two
  bool spare = false;          // for use only if none of the others answers
};
// Returns the local address from which packets to `peer` leave, as driver::source_address_towards() does.
using Route = std::function<Result<driver::SocketAddress>(const driver::SocketAddress& peer)>;
// Returns whether packets from this Nic's address to `to` leave by it. Empty: they do.
using Leaves = std::function<bool(const Nic& own, const driver::SocketAddress& to)>;

// Pairs up addresses: those that share a network, and those that the route to the peer's addresses names. Each is used
// at most once, fastest first. Spare rails come last. The result is empty if there is no way to the peer.
//
// A rail is spare if
// - it shares a wire with an earlier one, such as one of the other family or of a VLAN;
// - its packets leave by another interface of the same network;
// - a route makes it beside a shared network and it is not known to be faster than the network, or is a tunnel. Such a
//   route may lead through the shared network itself, so it counts only in another family than the network's. Routes to
//   faster interfaces are those of hosts where each NIC has a link of its own to its switch and a slower network joins
//   all hosts;
// - a route makes it beside an earlier rail, and it is a tunnel or of unknown rate;
// - it has less than a quarter of the best rail's rate: waiting for its part would cost more than it brings.
//
// In each pair of ranks only the one that connects decides. one_machine: both "hosts" share this machine's addresses
// (containers with its network, MOECCL_HOST_ID).
std::vector<Rail> choose_rails(std::span<const Nic> own, std::span<const Nic> peer, const Route& route,
                               bool one_machine = false, const Leaves& leaves = {});

// Returns the fastest pair of interfaces that `rails` leaves out although it is more than four times as fast as they
// are. Null: there is none.
std::optional<Rail> missed_rail(std::span<const Nic> own, std::span<const Nic> peer, std::span<const Rail> rails);

// Returns the number of connections for a rail: one carries some 20 Gbit/s on one core. `wanted` is
// MOECCL_SOCKET_STREAMS, `most` the limit for the rail.
uint32_t streams_for(const Rail& rail, int32_t wanted, uint32_t most);

}  // namespace moeccl::transport
