// SPDX-License-Identifier: Apache-2.0
// The one rule that decides how two ranks reach each other's host memory: src/world/connect.cc makes links by it, and
// `moeccl doctor` explains it to the user. The functions are pure.
#pragma once

#include <cstdint>

#include "src/plan/plan.h"

namespace moeccl::topology {

// Facts that hold for two ranks, or for all ranks of a communicator.
struct PathFacts {
  bool same_host = true;
  bool same_process = false;
  bool reads_allowed = false;  // process_vm_readv; all ranks of the communicator tried it between their processes
  bool paced = false;          // an emulated topology: nothing may bypass its links
};

enum class PairPath : uint8_t {
  kThreads,  // each other's buffers directly
  kReads,    // shared staging, and private buffers read by the kernel: one copy
  kStaging,  // shared staging: two copies
  kNetwork,  // between hosts
};
PairPath path_between(const PathFacts& facts);

// Returns what plans may rely on when `facts` hold for all pairs of ranks, for ordinary buffers.
plan::Reach reach_of_all(const PathFacts& facts);
// Returns true if all ranks reach the buffers of the symmetric heap although they do not reach ordinary ones.
bool heap_reaches_further(const PathFacts& facts);

}  // namespace moeccl::topology
