// SPDX-License-Identifier: Apache-2.0
// Finds the tensor, expert, context, pipeline and data parallel degrees that fit into the GPUs' memory, and what they
// communicate and compute in a step (MoNTA, Tables 3 and 4 and cluster expansion).
#pragma once

#include <cstdint>
#include <vector>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Status check(const moecclLayoutProblem_t& problem);
// Returns the feasible layouts of a checked problem by ascending time of a step, but those with long bubbles last.
std::vector<moecclLayout_t> solve_layout(const moecclLayoutProblem_t& problem);
// Computes memory and communication for the degrees in `layout`.
void price_layout(const moecclLayoutProblem_t& problem, moecclLayout_t& layout);
// Returns the cost of a step of a priced layout.
moecclLayoutCost_t step_of(const moecclLayoutProblem_t& problem, const moecclLayout_t& layout);
// Checks that all degrees are above 0 and together make n_gpus ranks.
Status check(const moecclLayoutProblem_t& problem, const moecclLayout_t& layout);

}  // namespace moeccl::solve
