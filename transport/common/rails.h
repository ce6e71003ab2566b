// SPDX-License-Identifier: Apache-2.0
// Which interfaces carry the data between two hosts. Pure, but for the question where a route leads, which is passed
// in.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "src/base/wire.h"
#include "src/driver/interface.h"

namespace moeccl::transport {

// An interface that a rank offers, with the port at which it listens there.
struct Nic {
  std::string name;
  driver::SocketAddress address;
  uint32_t prefix_bits = 0;
  int64_t mbit_per_s = 0;  // 0: unknown
};
inline constexpr size_t kMaxNics = 8;

// One of each interface, IPv4 before IPv6, at most kMaxNics. `filter`: MOECCL_SOCKET_IFNAME. Loopback only when named.
// InvalidArgument for a filter that leaves none; Unsupported when there is none.
Result<std::vector<Nic>> choose_nics(std::span<const driver::Interface> interfaces, const std::string& filter);

void write_nics(std::span<const Nic> nics, Writer& out);
// Bad ones read as none, and in.ok() turns false.
std::vector<Nic> read_nics(Reader& in);

struct Rail {
  uint32_t own = 0, peer = 0;  // indices of the two hosts' Nics
  int64_t mbit_per_s = 0;      // of the slower of the two; 0: unknown
};
// The own address from which packets to `peer` leave, as driver::source_address_towards().
using Route = std::function<Result<driver::SocketAddress>(const driver::SocketAddress& peer)>;

// Pairs of interfaces, each at most once, fastest first: first those in one network, else the one that the route to the
// peer's interfaces names. Rails with less than a quarter of the best one's rate are left out: waiting for their part
// costs more than it brings. Empty: no way. one_machine: both "hosts" are this machine (MOECCL_HOST_ID), whose
// addresses both have.
std::vector<Rail> choose_rails(std::span<const Nic> own, std::span<const Nic> peer, const Route& route,
                               bool one_machine = false);

// Connections for a rail: one carries some 20 Gbit/s on one core. `wanted`: MOECCL_SOCKET_STREAMS.
uint32_t streams_for(const Rail& rail, int32_t wanted);

}  // namespace moeccl::transport
