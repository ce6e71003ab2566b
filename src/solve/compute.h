// SPDX-License-Identifier: Apache-2.0
// Computation time from shapes (HybridEP Eq. 1 and 2).
#pragma once

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Result<moecclComputeShape_t> checked_shape(const moecclComputeShape_t& shape);

struct ComputeTime {
  double pre_expert_s = 0, expert_s = 0;
};
// Takes a checked shape.
ComputeTime compute_time(const moecclComputeShape_t& shape);

}  // namespace moeccl::solve
