// SPDX-License-Identifier: Apache-2.0
// RDMA devices by libibverbs, which is opened when asked for. Reads only: no memory is registered, no queue is made.
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
  double gbit = 0;                            // active width times active speed, 1e9 bits a second; 0: not known
  uint32_t mtu_bytes = 0;
  uint16_t lid = 0;
  std::vector<std::string> gids;  // those that are not zero, "fe80:0000:..." as the kernel writes them; at most 8
};

struct IbvDevice {
  std::string name;        // "mlx5_0"
  std::string sysfs_path;  // "/sys/class/infiniband/mlx5_0"
  std::vector<IbvPort> ports;
  std::string problem;  // why its ports could not be asked; "" when they could
};

// `library`: a path instead of libibverbs.so.1. Unsupported when there is no such library.
Result<std::vector<IbvDevice>> list_ibv_devices(const std::string& library = "");

// Of enum ibv_port_attr.active_width and active_speed (IB Architecture, PortInfo); 0 for unknown codes.
double ibv_gbit(uint8_t width_code, uint8_t speed_code);

}  // namespace moeccl::driver
