// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_choice.h"

#include <algorithm>
#include <limits>

#include "src/algo/experts/prove_experts.h"
#include "src/base/env.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/plan/checker.h"
#include "src/plan/op.h"

namespace moeccl::comm {

algo::WholeRows whole_blocks(plan::Plan plan) {
  algo::WholeRows all;
  all.bindings = plan::uniform_bindings(plan);
  all.plan = std::move(plan);
  return all;
}

std::vector<const char*> in_order(const Selector& selector, std::string_view forced, uint64_t problem,
                                  std::span<const Way> ways, bool decides) {
  std::vector<const char*> names;
  std::vector<Selector::Offer> offers;
  for (const Way& way : ways) {
    if (!way.applies.ok()) continue;
    names.push_back(way.name);
    problem = hash_combine(problem, hash_string(way.name));
    offers.push_back({way.name, [&](const plan::Profile& profile) {
                        const Result<algo::WholeRows> all = way.build();
                        return all.ok() ? plan::price(all->plan, all->bindings, selector.tree(), profile).total_ns
                                        : std::numeric_limits<double>::infinity();
                      }});
  }
  if (names.empty()) return names;
  const bool obeys = std::ranges::find(names, forced) != names.end();
  const std::string_view first = obeys ? forced : selector.cheapest(problem, offers, decides);
  std::ranges::stable_partition(names, [&](const char* name) { return name == first; });
  return names;
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

Status prove_if_asked(uint32_t n_ranks, moecclOp_t op, const std::string& name, const std::function<Status()>& proof) {
  if (!env().check_plans || n_ranks > algo::kMostProvedRanks) return {};
  MOECCL_TRY(proof());
  log(LogLevel::kInfo, "the plan {} of {} is proved", name, plan::op_name(op));
  return {};
}

void warn_of_force(const Selector& selector, moecclOp_t op, uint64_t problem, uint64_t bytes, const Status& why,
                   const std::string& instead) {
  selector.warn_of_force(op, problem,
                         format("{} is forced but does not apply to experts of {} bytes: {}; {} runs instead",
                                selector.forced(op), bytes, why.message(), instead));
}

std::string why_chosen(const Selector& selector, moecclOp_t op, const std::string& name, const Status& follows,
                       const std::string& otherwise) {
  const std::string& forced = selector.forced(op);
  if (!follows.ok()) return format("{}; {} is forced but does not apply: {}", otherwise, forced, follows.message());
  return name == forced ? "forced by moecclPlanForce or MOECCL_PLAN" : otherwise;
}

}  // namespace moeccl::comm
