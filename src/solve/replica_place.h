// SPDX-License-Identifier: Apache-2.0
// Chooses where replicas are placed and which tokens each serves: adaptive replication's contiguous placement, and one
// that also considers the nodes that tokens come from and the fullest rank.
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Result<moecclReplicaProblem_t> checked(const moecclReplicaProblem_t& problem);
// These take checked problems.
void solve_replicas(const moecclReplicaProblem_t& problem, int32_t* slot_expert, moecclReplicaAnswer_t* answer);
void split_tokens(const moecclReplicaProblem_t& problem, const int32_t* slot_expert, int32_t* split);

}  // namespace moeccl::solve
