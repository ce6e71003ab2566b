// SPDX-License-Identifier: Apache-2.0
// Proofs of plans that a placement, domains or blocks make, as MOECCL_CHECK_PLANS asks for them.
#pragma once

#include <functional>
#include <string>

#include "moeccl/plan.h"
#include "src/base/status.h"

namespace moeccl::comm {

// Proves a plan if the environment asks for proofs and the ranks are not too many.
Status prove_if_asked(uint32_t n_ranks, moecclOp_t op, const std::string& name, const std::function<Status()>& proof);

}  // namespace moeccl::comm
