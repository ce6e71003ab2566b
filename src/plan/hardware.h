// SPDX-License-Identifier: Apache-2.0
// Constants for hardware on which nothing was measured: what a price takes where no profile says more.
#pragma once

#include <span>

#include "src/plan/profile.h"

namespace moeccl::plan {

// One figure of a Profile, and where it is from.
struct Constant {
  const char* name;  // as in a profile file
  double Profile::*member;
  double value;
  const char* source;
};

struct Hardware {
  const char* name;
  std::span<const Constant> constants;
  Profile profile;
};

// A core of the machine on which Profile's defaults were measured.
Hardware host_hardware();
// A GPU of the H100's class: an engine and a memory of its own for every rank, no cores to share, and no scheduler.
Hardware device_hardware();
// By the innermost level of the topology: devices where it is named "gpu".
Hardware hardware_of(const LevelTree& tree);

inline Profile device_profile() { return device_hardware().profile; }

}  // namespace moeccl::plan
