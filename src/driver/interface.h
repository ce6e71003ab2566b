// SPDX-License-Identifier: Apache-2.0
// This host's network interfaces.
#pragma once

#include <cstdint>
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
};

// Omits link-local IPv6 addresses, because they mean nothing to the other side without an interface.
Result<std::vector<Interface>> interfaces();

// Returns true if both addresses are in the same network of `prefix_bits` bits.
bool same_network(const SocketAddress& a, const SocketAddress& b, uint32_t prefix_bits);

}  // namespace moeccl::driver
