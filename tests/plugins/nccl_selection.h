// SPDX-License-Identifier: Apache-2.0
// What NCCL itself would choose: its model of costs (2.30's, as its source states it), for a machine as NCCL finds it.
// Nothing of the tuner's own code is in here.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace moeccl::testing {

// As NCCL's topology search describes a machine.
struct Machine {
  std::string name;
  size_t ranks_per_node = 8;
  int n_channels = 8;
  double intra_gbs = 20;  // of a channel, within a node
  double inter_gbs = 20;  // of a channel, between nodes
  bool nvlink = true;     // else PCI, without LL128
  bool hopper = true;     // else Ampere
  double nvls_gbs = 0;    // of NVLink SHARP's 16 channels together; 0: none
};

using CostTable = std::array<std::array<float, 3>, 7>;  // microseconds, -1: not to be used
// `function`: 0 Broadcast, 1 Reduce, 2 AllGather, 3 ReduceScatter, 4 AllReduce.
CostTable nccl_costs(const Machine& m, size_t n_nodes, int function, size_t bytes);
// The entry that NCCL takes: algorithm * 3 + protocol, -1 when it finds none.
int nccl_choice(const CostTable& costs);
std::string entry_name(int entry);

}  // namespace moeccl::testing
