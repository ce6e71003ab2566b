// SPDX-License-Identifier: Apache-2.0
// This host's network interfaces.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/driver/socket.h"

namespace moeccl::driver {

// One address of an interface that is up. An interface with several addresses appears several times.
struct Interface {
  std::string name;
  SocketAddress address;  // port 0
  uint32_t prefix_bits = 0;
  bool loopback = false;
  int64_t mbit_per_s = 0;  // as its driver reports it; 0 if it does not (virtual devices)
  bool tunnel = false;     // vxlan, geneve, wireguard, tun, ipip, gre, sit: it leads through another interface
  // Names the device that a VLAN, a macvlan, an ipvlan or a label ("eth0:1") shares with other interfaces of this host.
  // Empty: it is none of these, and its own name counts.
  std::string wire = {};
};

// Omits link-local IPv6 addresses, because they mean nothing to the other side without an interface.
Result<std::vector<Interface>> interfaces();

// Returns whether packets from the address `from` of an interface to `to` leave by that interface, under the rules of
// this host's routing. Nothing: the kernel does not say.
std::optional<bool> leaves_by(const std::string& interface, const SocketAddress& from, const SocketAddress& to);

// Returns true if both addresses are in the same network of `prefix_bits` bits.
bool same_network(const SocketAddress& a, const SocketAddress& b, uint32_t prefix_bits);

}  // namespace moeccl::driver
