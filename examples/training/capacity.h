// SPDX-License-Identifier: Apache-2.0
// What slots with a capacity drop, and what that costs in steps (adaptive replication, Table 1 and Section 5.2).
#pragma once

#include "features.h"

namespace training {

inline constexpr int kCapacityRanks = 16;  // the paper's

// Trains all cases on the kCapacityRanks ranks of a communicator, and prints on rank 0 a line for perf/papers per
// figure. Returns whether placing at every step drops the fewest tokens.
bool study_capacity(size_t steps, moecclComm_t comm);

}  // namespace training
