// SPDX-License-Identifier: Apache-2.0
// Constants for hardware on which nothing was measured. Prices use them where no profile has a figure.
#pragma once

#include <span>

#include "src/plan/profile.h"

namespace moeccl::plan {

// One figure of a Profile and its source.
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
// A GPU of the H100's class as each of the two engines for CUDA memory uses it: every rank has its own engine and
// memory, shares no cores and has no scheduler. The streams' engine launches a kernel for each step; the persistent
// kernel is launched once for each operation. The first is for operations that run step by step, the second for all
// others: dispatch and combine run on the persistent kernel where a communicator has one.
Hardware stream_hardware();
Hardware kernel_hardware();
// Chooses by the innermost level of the topology: the persistent kernel if it is named "gpu".
Hardware hardware_of(const LevelTree& tree);

}  // namespace moeccl::plan
