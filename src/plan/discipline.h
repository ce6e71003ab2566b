// SPDX-License-Identifier: Apache-2.0
// The rules of plan.h that can be read off the programs without running them. The checker's first pass.
#pragma once

#include <string>

#include "src/base/status.h"
#include "src/plan/plan.h"

namespace moeccl::plan {

// Success, or moecclInternalError with a sentence that names rank, lane and step.
Status check_discipline(const Plan& plan);

// "rank 3, inter lane 1, step 7 (wait for rank 2, sig 0)".
std::string step_name(const Program& program, uint32_t lane, uint32_t step);
// "part 1/4 of slot 2 of rank 5".
std::string ref_name(const Ref& ref);

}  // namespace moeccl::plan
