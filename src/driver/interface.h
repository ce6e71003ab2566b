// SPDX-License-Identifier: Apache-2.0
// This host's network interfaces.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/driver/socket.h"

namespace moeccl::driver {

// One address of an interface that is up. An interface with several addresses is there several times.
struct Interface {
  std::string name;
  SocketAddress address;  // port 0
  uint32_t prefix_bits = 0;
  bool loopback = false;
  int64_t mbit_per_s = 0;  // as the driver says; 0: it does not (virtual devices)
};

// Link-local IPv6 addresses are left out: they mean nothing without an interface on the other side.
Result<std::vector<Interface>> interfaces();

// Whether both lie in one network of `prefix_bits` bits.
bool same_network(const SocketAddress& a, const SocketAddress& b, uint32_t prefix_bits);

}  // namespace moeccl::driver
