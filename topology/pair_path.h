// SPDX-License-Identifier: Apache-2.0
// The one rule by which two ranks reach each other's host memory: src/world/connect.cc makes links by it, and
// `moeccl doctor` tells it to a person. Pure.
#pragma once

#include <cstdint>

#include "src/plan/plan.h"

namespace moeccl::topology {

// What holds for two ranks, or for all ranks of a communicator.
struct PathFacts {
  bool same_host = true;
  bool same_process = false;
  bool reads_allowed = false;  // process_vm_readv, tried by all ranks of the communicator between their processes
  bool paced = false;          // an emulated topology: nothing may go past its links
};

enum class PairPath : uint8_t {
  kThreads,  // each other's buffers as they are
  kReads,    // shared staging, and private buffers read by the kernel: one copy
  kStaging,  // shared staging: two copies
  kNetwork,  // between hosts
};
PairPath path_between(const PathFacts& facts);

// What plans may count on when `facts` hold for all pairs of ranks: of ordinary buffers...
plan::Reach reach_of_all(const PathFacts& facts);
// ... and whether buffers of the symmetric heap are reached by all though ordinary ones are not.
bool heap_reaches_further(const PathFacts& facts);

}  // namespace moeccl::topology
