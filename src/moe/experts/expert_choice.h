// SPDX-License-Identifier: Apache-2.0
// What the choices of plans for replicated experts and for expert domains have in common.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/algo/experts/expert_rows.h"
#include "src/plan/printer.h"
#include "src/select/selection.h"

namespace moeccl::comm {

// One of the ways to run a call.
struct Way {
  const char* name;
  Status applies;                                  // success, or why it runs no call like this one
  std::function<Result<algo::WholeRows>()> build;  // makes all ranks' programs; fails if the call does not fit
};

// Returns the build of plans of blocks, which read no lists.
algo::WholeRows whole_blocks(plan::Plan plan);

// Returns the names of the ways that apply, in the order in which to try them: first the forced one, or else the
// cheapest. The first way that applies stays first unless another gains in price. problem, decides: as for
// Selector::cheapest().
std::vector<const char*> in_order(const Selector& selector, std::string_view forced, uint64_t problem,
                                  std::span<const Way> ways, bool decides);

// Returns what make(name) returns for the first way for which that succeeds, or why it failed for the first.
template <class Make>
auto make_first(std::span<const char* const> names, Make&& make) -> decltype(make(names[0])) {
  Status why;
  for (const char* name : names) {
    auto made = make(name);
    if (made.ok()) return made;
    if (why.ok()) why = made.status();
  }
  return why;
}

// What `explain` shows: all ways, and the programs and the price of the one that is chosen.
struct WaysPage {
  std::vector<plan::PlanCandidate> candidates;
  plan::Plan plan;
  plan::Cost cost;
};
// chosen: the name of a way that runs the call.
WaysPage page_of(const Selector& selector, std::span<const Way> ways, std::string_view chosen);

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
