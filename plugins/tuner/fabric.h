// SPDX-License-Identifier: Apache-2.0
// What a profile knows about the links between hosts, which NCCL treats as one network of one speed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "src/plan/profile.h"

namespace moeccl::tuner {

struct FabricLevel {
  std::string name;
  double alpha_us = 0;      // of a small message
  double bytes_per_us = 0;  // of a group's uplink, large messages
  double hosts = 0;         // of one group of this level; 0: not known
};

// A level that a communicator's hosts cross. The hosts are taken to lie side by side, because NCCL says how many there
// are but not which.
struct Crossing {
  double alpha_us = 0, bytes_per_us = 0;
  double groups = 0;  // groups of this level among the communicator's hosts
};

struct Fabric {
  std::vector<FabricLevel> levels;  // outermost first; in the last a group is a host. Empty: nothing is known.
  double least_r2 = 1;
  std::vector<Crossing> crossings(size_t n_hosts) const;
};

// topology: the text that the profile's file carries, for the sizes of groups; may be empty. rails: how many links of
// the measured kind a host uses at once. An error says what the profile lacks.
Result<Fabric> fabric_of(const plan::Profile& profile, std::string_view topology, int rails);

}  // namespace moeccl::tuner
