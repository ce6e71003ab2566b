// SPDX-License-Identifier: Apache-2.0
// Where replicas stand and whom they serve: adaptive replication's contiguous placement, and one that also looks at the
// nodes that tokens come from and at the fullest rank.
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Result<moecclReplicaProblem_t> checked(const moecclReplicaProblem_t& problem);
// For checked problems.
void solve_replicas(const moecclReplicaProblem_t& problem, int32_t* slot_expert, moecclReplicaAnswer_t* answer);
void split_tokens(const moecclReplicaProblem_t& problem, const int32_t* slot_expert, int32_t* split);

}  // namespace moeccl::solve
