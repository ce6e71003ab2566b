// SPDX-License-Identifier: Apache-2.0
// Chooses the network interfaces that carry the data between two hosts. All functions are pure; the route lookup is
// passed in.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "src/base/wire.h"
#include "src/driver/interface.h"

namespace moeccl::transport {

// An interface that a rank offers, with the port on which it listens there.
struct Nic {
  std::string name;
  driver::SocketAddress address;
  uint32_t prefix_bits = 0;
  int64_t mbit_per_s = 0;  // 0: unknown
};
inline constexpr size_t kMaxNics = 8;

// Chooses one address of each interface, IPv4 before IPv6, at most kMaxNics. `filter` is MOECCL_SOCKET_IFNAME. Loopback
// is chosen only by name. Returns InvalidArgument for a filter that leaves no interface, Unsupported when there is none
// without a filter.
Result<std::vector<Nic>> choose_nics(std::span<const driver::Interface> interfaces, const std::string& filter);

void write_nics(std::span<const Nic> nics, Writer& out);
// Returns an empty list for malformed input.
std::vector<Nic> read_nics(Reader& in);

struct Rail {
  uint32_t own = 0, peer = 0;  // indices of the two hosts' Nics
  int64_t mbit_per_s = 0;      // rate of the slower of the two; 0: unknown
};
// Returns the local address from which packets to `peer` leave, as driver::source_address_towards() does.
using Route = std::function<Result<driver::SocketAddress>(const driver::SocketAddress& peer)>;

// Pairs up interfaces, each used at most once, fastest first. If no two interfaces share a network, the pair is the one
// that the route to the peer's interfaces names. Rails with less than a quarter of the best rail's rate are left out,
// because waiting for their part costs more than it brings. The result is empty if there is no way to the peer.
// one_machine: both "hosts" share this machine's addresses (containers with its network, MOECCL_HOST_ID).
std::vector<Rail> choose_rails(std::span<const Nic> own, std::span<const Nic> peer, const Route& route,
                               bool one_machine = false);

// Returns the number of connections for a rail: one carries some 20 Gbit/s on one core. `wanted` is
// MOECCL_SOCKET_STREAMS.
uint32_t streams_for(const Rail& rail, int32_t wanted);

}  // namespace moeccl::transport
