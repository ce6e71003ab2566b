// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_choice.h"

#include <algorithm>
#include <limits>

#include "src/base/hash.h"
#include "src/plan/checker.h"

namespace moeccl::comm {

algo::WholeRows whole_blocks(plan::Plan plan) {
  algo::WholeRows all;
  all.bindings = plan::uniform_bindings(plan);
  all.plan = std::move(plan);
  return all;
}

std::vector<const char*> WayOrder::first(std::string_view name) const {
  std::vector<const char*> all = names;
  std::ranges::stable_partition(all, [&](const char* n) { return n == name; });
  return all;
}

void WayOrder::enter(PlanSlot& slot, Make make) const {
  if (tried.empty()) return;
  slot.tried = tried;
  slot.trial_class = trial_class;
  slot.most_bytes = most_bytes;
  slot.remake = [all = names, make = std::move(make)](const PlanSlot& of, std::string_view name) {
    std::vector<const char*> wanted = all;
    std::ranges::stable_partition(wanted, [&](const char* n) { return n == name; });
    return make_first(wanted, [&](const char* n) { return make(of, n); });
  };
}

WayOrder in_order(const Selector& selector, std::string_view forced, Problem problem, std::span<const Way> ways) {
  WayOrder order;
  std::vector<Selector::Offer> offers;
  uint64_t hash = problem.hash;
  for (const Way& way : ways) {
    if (!way.applies.ok()) continue;
    order.names.push_back(way.name);
    hash = hash_combine(hash_combine(hash, hash_string(way.name)), way.bits);
    offers.push_back({way.name,
                      [&](const plan::Profile& profile) {
                        const Result<algo::WholeRows> all = way.build();
                        return all.ok() ? plan::price(all->plan, all->bindings, selector.tree(), profile).total_ns
                                        : std::numeric_limits<double>::infinity();
                      },
                      way.bits});
  }
  if (offers.empty()) return order;
  std::string_view first = forced;
  if (std::ranges::find(order.names, forced) == order.names.end()) {
    Selector::Compared compared = selector.compare(hash, offers, problem.decides);
    first = compared.cheapest;
    if (!compared.tried.empty() && Selector::tries_offers(problem.most_bytes)) {
      order.tried = std::move(compared.tried);
      order.trial_class = compared.trial_class;
      order.most_bytes = problem.most_bytes;
      order.trial = selector.report(order.trial_class);
    }
  }
  std::ranges::stable_partition(order.names, [&](const char* name) { return name == first; });
  return order;
}

WaysPage page_of(const Selector& selector, std::span<const Way> ways, std::string_view chosen) {
  WaysPage page;
  const std::shared_ptr<const plan::Profile> profile = selector.profile();
  for (const Way& way : ways) {
    Result<algo::WholeRows> all = way.applies.ok() ? way.build() : way.applies;
    page.candidates.push_back({way.name, 0, all.status().message()});
    if (!all.ok()) continue;
    plan::Cost cost = plan::price(all->plan, all->bindings, selector.tree(), *profile);
    page.candidates.back().predicted_ns = cost.total_ns;
    if (way.name != chosen) continue;
    page.plan = std::move(all->plan);
    page.cost = std::move(cost);
  }
  return page;
}

void warn_of_force(const Selector& selector, moecclOp_t op, uint64_t problem, uint64_t bytes, const Status& why,
                   const std::string& instead) {
  selector.warn_of_force(op, problem,
                         format("{} is forced but does not apply to experts of {} bytes: {}; {} runs instead",
                                selector.forced(op), bytes, why.message(), instead));
}

std::string why_chosen(const Selector& selector, moecclOp_t op, const std::string& name, const Status& follows,
                       const WayOrder& order, std::string otherwise) {
  const std::string& forced = selector.forced(op);
  if (order.trial.decided) {
    otherwise = order.trial.text();
  } else if (!order.tried.empty()) {
    otherwise += "; a trial of";
    for (size_t i = 0; i < order.tried.size(); ++i)
      otherwise += format("{}{}", i == 0 ? " " : i + 1 == order.tried.size() ? " and " : ", ", order.tried[i].name);
    otherwise += " has not ended";
  }
  if (!follows.ok()) return format("{}; {} is forced but does not apply: {}", otherwise, forced, follows.message());
  return name == forced ? "forced by moecclPlanForce or MOECCL_PLAN" : otherwise;
}

}  // namespace moeccl::comm
