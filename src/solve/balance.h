// SPDX-License-Identifier: Apache-2.0
// Expert load balance as EPLB's users ask for it: replicas of experts on GPUs, from the load of each expert.
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Result<moecclBalanceProblem_t> checked(const moecclBalanceProblem_t& problem);
// Takes a checked problem.
void solve_balance(const moecclBalanceProblem_t& problem, int32_t* slot_expert, moecclBalanceAnswer_t* answer);

}  // namespace moeccl::solve
