// SPDX-License-Identifier: Apache-2.0
// The rules of plan.h that can be checked without running the programs. This is the checker's first pass.
#pragma once

#include <string>

#include "src/base/status.h"
#include "src/plan/plan.h"

namespace moeccl::plan {

// Returns success, or moecclInternalError with a message that names rank, lane and step.
Status check_discipline(const Plan& plan);

// Returns a name such as "rank 3, inter lane 1, step 7 (wait for rank 2, sig 0)".
std::string step_name(const Program& program, uint32_t lane, uint32_t step);
// Returns a name such as "part 1/4 of slot 2 of rank 5".
std::string ref_name(const Ref& ref);

}  // namespace moeccl::plan
