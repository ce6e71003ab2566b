// SPDX-License-Identifier: Apache-2.0
// Which tensor, expert, context, pipeline and data parallel degrees fit into the GPUs' memory, and what they
// communicate (MoNTA, Tables 3 and 4 and cluster expansion).
#pragma once

#include <cstdint>
#include <vector>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Status check(const moecclLayoutProblem_t& problem);
// Feasible layouts of a checked problem, ascending by communication time.
std::vector<moecclLayout_t> solve_layout(const moecclLayoutProblem_t& problem);
// Memory and times of the degrees that `layout` names.
void price_layout(const moecclLayoutProblem_t& problem, moecclLayout_t& layout);

}  // namespace moeccl::solve
