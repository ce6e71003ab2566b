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
  uint32_t bits = 0;                               // as Selector::Offer::bits
};

// Returns the build of plans of blocks, which read no lists.
algo::WholeRows whole_blocks(plan::Plan plan);

// A class of calls, as Selector::compare() takes it.
struct Problem {
  uint64_t hash = 0;
  uint64_t most_bytes = 0;  // of any rank's larger buffer; 0: the plans are not tried against each other
  bool decides = false;
};

// The ways that apply to a call.
struct WayOrder {
  // In the order in which to see whether they fit: first the forced one, or else the cheapest. The first way that
  // applies stays first unless another gains in price.
  std::vector<const char*> names;
  std::vector<Trials::Plan> tried;           // against each other; empty: none
  uint64_t trial_class = 0, most_bytes = 0;  // of those
  Trials::Report trial;
  // The same names, but first the one that a trial has found to be the fastest.
  std::vector<const char*> as_now() const { return first(trial.decided ? trial.plan : ""); }
  // First the one that the next operation runs, as far as is known: with a placement that changes at every step, each
  // call then makes one plan, and the time that a rank takes for it counts against no plan of a trial.
  std::vector<const char*> as_next() const { return first(trial.next); }
  // Makes `slot` part of the trial, if there is one. make: makes the slot of a way that fits, or says why it does not.
  using Make = std::function<Result<std::shared_ptr<PlanSlot>>(const PlanSlot& slot, const char* name)>;
  void enter(PlanSlot& slot, Make make) const;

 private:
  std::vector<const char*> first(std::string_view name) const;
};
WayOrder in_order(const Selector& selector, std::string_view forced, Problem problem, std::span<const Way> ways);

// Returns what make(name) returns for the first way for which that succeeds, or why it failed for the first. A plan
// that is wrong, as its proof shows, is not passed over.
template <class Make>
auto make_first(const std::vector<const char*>& names, Make&& make) -> decltype(make(names[0])) {
  Status why;
  for (const char* name : names) {
    auto made = make(name);
    if (made.ok() || made.status().code() == moecclInternalError) return made;
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

// Logs why the forced plan does not run experts of `bytes`; problem: as for Selector::warn_of_force().
void warn_of_force(const Selector& selector, moecclOp_t op, uint64_t problem, uint64_t bytes, const Status& why,
                   const std::string& instead);

// Returns what a page says of the plan that runs. follows: why the forced one does not, or success; otherwise: what
// chooses where none is forced or tried.
std::string why_chosen(const Selector& selector, moecclOp_t op, const std::string& name, const Status& follows,
                       const WayOrder& order, std::string otherwise);

}  // namespace moeccl::comm
