// SPDX-License-Identifier: Apache-2.0
// What the choices of plans for replicated experts and for expert domains have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "src/select/selection.h"

namespace moeccl::comm {

// Runs the proof of a plan where MOECCL_CHECK_PLANS asks for it and there are few enough ranks.
Status prove_if_asked(uint32_t n_ranks, moecclOp_t op, const std::string& name, const std::function<Status()>& proof);

// Logs why the forced plan does not run experts of `bytes`; problem: as for Selector::warn_of_force().
void warn_of_force(const Selector& selector, moecclOp_t op, uint64_t problem, uint64_t bytes, const Status& why,
                   const std::string& instead);

// Returns what a page says of the plan that runs. follows: why the forced one does not, or success; otherwise: what
// chooses where none is forced.
std::string why_chosen(const Selector& selector, moecclOp_t op, const std::string& name, const Status& follows,
                       const std::string& otherwise);

}  // namespace moeccl::comm
