// SPDX-License-Identifier: Apache-2.0
// Which tensor, expert, context, pipeline and data parallel degrees fit into the GPUs' memory, and what they
// communicate and compute in a step (MoNTA, Tables 3 and 4 and cluster expansion).
#pragma once

#include <cstdint>
#include <vector>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Status check(const moecclLayoutProblem_t& problem);
// Feasible layouts of a checked problem, ascending by the time of a step; those with long bubbles last.
std::vector<moecclLayout_t> solve_layout(const moecclLayoutProblem_t& problem);
// Memory and communication of the degrees that `layout` names.
void price_layout(const moecclLayoutProblem_t& problem, moecclLayout_t& layout);
// A step of a layout that was priced.
moecclLayoutCost_t step_of(const moecclLayoutProblem_t& problem, const moecclLayout_t& layout);
// Degrees above 0.
Status check(const moecclLayout_t& layout);

}  // namespace moeccl::solve
