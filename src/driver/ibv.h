// SPDX-License-Identifier: Apache-2.0
// RDMA devices through libibverbs, which is opened on demand. Only reads: it registers no memory and creates no queue.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "src/base/status.h"

namespace moeccl::driver {

struct IbvPort {
  uint32_t number = 1;
  bool active = false;
  bool infiniband = false, ethernet = false;  // the link layer
  double gbit = 0;                            // active width times active speed in 1e9 bits per second; 0 if unknown
  uint32_t mtu_bytes = 0;
  std::vector<std::string> gids;  // the nonzero ones, "fe80:0000:..." as the kernel writes them; at most 8
};

struct IbvDevice {
  std::string name;  // "mlx5_0"
  std::vector<IbvPort> ports;
  std::string problem;  // why its ports could not be queried; "" if they could
};

// `library` is a path to use instead of libibverbs.so.1. Returns Unsupported when there is no such library.
Result<std::vector<IbvDevice>> list_ibv_devices(const std::string& library = "");

// Converts enum ibv_port_attr.active_width and active_speed (IB Architecture, PortInfo). Returns 0 for unknown codes.
double ibv_gbit(uint8_t width_code, uint8_t speed_code);

}  // namespace moeccl::driver
