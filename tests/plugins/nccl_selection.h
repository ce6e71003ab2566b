// SPDX-License-Identifier: Apache-2.0
// The choice that NCCL itself would make: its cost model (of 2.30, as its source states it) for a machine as NCCL
// detects it. Contains none of the tuner's own code.
#pragma once

#include <array>
#include <cstddef>
#include <string>

namespace moeccl::testing {

// A machine as NCCL's topology search describes it.
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

using CostTable = std::array<std::array<float, 3>, 7>;  // microseconds; -1: not usable
// `function`: 0 Broadcast, 1 Reduce, 2 AllGather, 3 ReduceScatter, 4 AllReduce.
CostTable nccl_costs(const Machine& m, size_t n_nodes, int function, size_t bytes);
// Returns the entry that NCCL takes: algorithm * 3 + protocol, or -1 when it finds none.
int nccl_choice(const CostTable& costs);
std::string entry_name(int entry);

}  // namespace moeccl::testing
