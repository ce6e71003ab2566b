// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_plans.h"

#include <bit>
#include <limits>

#include "src/algo/experts/prove_experts.h"
#include "src/base/hash.h"
#include "src/moe/experts/expert_choice.h"

namespace moeccl::comm {
namespace {

using algo::GradientReduce;
using algo::ReduceKind;
using algo::ReplicaMove;
using algo::ReplicaReduce;

constexpr ReduceKind kKinds[] = {ReduceKind::kDirect, ReduceKind::kNodes, ReduceKind::kFlat};

const char* name_of(const ExpertRows& rows) {
  return std::visit([](const auto& r) { return r.name(); }, rows);
}

algo::WholeRows whole(const ExpertRows& rows) {
  return std::visit([](const auto& r) { return algo::whole_rows(r); }, rows);
}

}  // namespace

// The kinds add in different orders, so a deterministic communicator has one: "nodes" where it can run, else "flat".
Status ExpertPlans::runs(ReduceKind kind, const plan::Shape& shape) const {
  const auto can_run = [&](ReduceKind k) -> Status {
    MOECCL_TRY(ReplicaReduce::applies(k, shape.reach, comm_.tree()));
    return ReplicaReduce(call_.placement, shape, comm_.tree(), k, call_.average).fits();
  };
  if (comm_.config().deterministic && kind != ReduceKind::kNodes) {
    const ReduceKind only = can_run(ReduceKind::kNodes).ok() ? ReduceKind::kNodes : ReduceKind::kFlat;
    if (kind != only)
      return error(moecclUnsupported, "a deterministic communicator adds in the order of {}",
                   algo::reduce_kind_name(only));
  }
  return can_run(kind);
}

std::vector<const char*> ExpertPlans::ways() const {
  if (call_.op == moecclOpExpertAllReduce) {
    std::vector<const char*> names;
    for (const ReduceKind kind : kKinds) names.push_back(algo::reduce_kind_name(kind));
    return names;
  }
  if (call_.op == moecclOpCollectGradients) return {"direct"};
  const bool nodes = call_.op == moecclOpPlaceWeights ? algo::needs_nodes(reduce_shape(false), comm_.tree()).ok()
                                                      : GradientReduce::nodes_save_bytes(call_.placement, comm_.tree());
  if (nodes) return {"nodes", "direct"};
  return {"direct", "nodes"};
}

Result<ExpertRows> ExpertPlans::make_rows(const std::string& way, const algo::RowSize& size) const {
  const bool nodes = way == "nodes";
  if (call_.op != moecclOpReduceGradients) {
    Result<ReplicaMove> made =
        ReplicaMove::make(call_.placement, comm_.tree(),
                          {call_.op, size.count, size.element_bytes, side_.reach(false), size.staging_bytes,
                           nodes ? ReplicaMove::Way::kNodes : ReplicaMove::Way::kDirect});
    if (!made.ok()) return made.status();
    return ExpertRows(std::move(*made));
  }
  Result<GradientReduce> made =
      GradientReduce::make(call_.placement, comm_.tree(),
                           {size.count, size.element_bytes, call_.average, side_.reach(false), size.staging_bytes,
                            nodes ? GradientReduce::Way::kNodes : GradientReduce::Way::kDirect});
  if (!made.ok()) return made.status();
  return ExpertRows(std::move(*made));
}

// Both ways of ReduceGradients add in different orders, so a deterministic communicator has the one that the placement
// gives, and the other only where that does not fit.
Status ExpertPlans::rows_run(const std::string& way) const {
  if (call_.op == moecclOpReduceGradients && comm_.config().deterministic) {
    for (const char* name : ways()) {
      if (name == way) break;
      if (make_rows(name).ok())
        return error(moecclUnsupported, "a deterministic communicator adds in the order that the placement gives");
    }
  }
  return make_rows(way).status();
}

Status ExpertPlans::obeys_force() const {
  const std::string& forced = side_.selector.forced(call_.op);
  if (forced.empty() || comm_.n_ranks() == 1) return {};
  if (call_.op != moecclOpExpertAllReduce) return rows_run(forced);
  for (const ReduceKind kind : kKinds)
    if (forced == algo::reduce_kind_name(kind)) return runs(kind, reduce_shape(false));
  return {};
}

// Placements of one class differ in where replicas are, which changes prices less than sizes do.
const char* ExpertPlans::cheapest(const std::vector<Selector::Offer>& offers, const plan::Reach& reach,
                                  bool decides) const {
  uint64_t slots = 0;
  for (uint32_t r = 0; r < comm_.n_ranks(); ++r) slots += call_.placement.n_slots(r);
  uint64_t problem = hash_combine(static_cast<uint64_t>(call_.op), call_.placement.n_experts);
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(slots)));
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(call_.count * call_.element_bytes)));
  problem = hash_combine(problem, plan::reach_bits(reach.staging, reach.views, reach.reads));
  for (const Selector::Offer& o : offers) problem = hash_combine(problem, hash_string(o.name));
  return side_.selector.cheapest(problem, offers, decides);
}

Result<ReduceKind> ExpertPlans::choose_reduce(bool reachable, bool decides) const {
  const plan::Shape shape = reduce_shape(reachable);
  const std::string& forced = side_.selector.forced(call_.op);
  Status why;
  std::vector<Selector::Offer> offers;
  std::vector<ReduceKind> kinds;
  for (const ReduceKind kind : kKinds) {
    if (Status applies = runs(kind, shape); !applies.ok()) {
      why = std::move(applies);
      continue;
    }
    if (forced == algo::reduce_kind_name(kind)) return kind;
    kinds.push_back(kind);
    offers.push_back({algo::reduce_kind_name(kind), [&, kind](const plan::Profile& profile) {
                        const ReplicaReduce reduce(call_.placement, shape, comm_.tree(), kind, call_.average);
                        return plan::price(reduce.build_all(), comm_.tree(), profile).total_ns;
                      }});
  }
  if (kinds.empty()) return why;
  const char* best = cheapest(offers, shape.reach, decides);
  for (size_t i = 0; i < kinds.size(); ++i)
    if (std::string_view(offers[i].name) == best) return kinds[i];
  return kinds[0];
}

Result<ExpertRows> ExpertPlans::choose_rows(bool decides) const {
  const std::string& forced = side_.selector.forced(call_.op);
  if (!forced.empty() && rows_run(forced).ok()) return make_rows(forced);
  std::vector<const char*> names = ways();
  // Where the ways may not change places, or too many ranks would have to be priced, the first that fits runs.
  const bool fixed = comm_.config().deterministic && plan::reduces(call_.op);
  if (!fixed && comm_.n_ranks() <= Selector::kMostRanksOfOffers && names.size() > 1) {
    std::vector<Selector::Offer> offers;
    for (const char* name : names) {
      offers.push_back({name, [this, name](const plan::Profile& profile) {
                          const Result<ExpertRows> rows = make_rows(name);
                          if (!rows.ok()) return std::numeric_limits<double>::infinity();
                          const algo::WholeRows all = whole(*rows);
                          return plan::price(all.plan, all.bindings, comm_.tree(), profile).total_ns;
                        }});
    }
    if (algo::needs_nodes(reduce_shape(false), comm_.tree()).ok() &&
        std::string_view(cheapest(offers, side_.reach(false), decides)) == names[1])
      std::swap(names[0], names[1]);
  }
  Status why;
  for (const char* name : names) {
    Result<ExpertRows> made = make_rows(name);
    if (made.ok()) return made;
    if (why.ok()) why = made.status();
  }
  return why;
}

Status ExpertPlans::check_reduce(ReduceKind kind, bool reachable) const {
  return prove_if_asked(comm_.n_ranks(), call_.op, algo::reduce_kind_name(kind), [&] {
    const plan::Shape shape = reduce_shape(reachable);
    const ReplicaReduce reduce(call_.placement, shape, comm_.tree(), kind, call_.average);
    return algo::prove_blocks(reduce.build_all(), algo::expected_sums(call_.placement, call_.average));
  });
}

Status ExpertPlans::check_rows(const std::string& name) const {
  const auto make = [&](const algo::RowSize& size) -> Result<algo::WholeRows> {
    MOECCL_ASSIGN_OR_RETURN(const ExpertRows rows, make_rows(name, size));
    return whole(rows);
  };
  return prove_if_asked(comm_.n_ranks(), call_.op, name,
                        [&] { return algo::prove_rows(call_.placement, call_.average, make); });
}

Result<ExpertPlans::Page> ExpertPlans::page() const {
  return call_.op == moecclOpExpertAllReduce ? reduce_page() : rows_page();
}

Result<ExpertPlans::Page> ExpertPlans::reduce_page() const {
  Page page;
  const std::shared_ptr<const plan::Profile> profile = side_.selector.profile();
  const plan::Shape shape = reduce_shape(false);
  MOECCL_ASSIGN_OR_RETURN(const ReduceKind chosen, choose_reduce(false, false));
  for (const ReduceKind kind : kKinds) {
    const ReplicaReduce reduce(call_.placement, shape, comm_.tree(), kind, call_.average);
    if (const Status applies = runs(kind, shape); !applies.ok()) {
      page.candidates.push_back({reduce.name(), 0, applies.message()});
      continue;
    }
    plan::Plan built = reduce.build_all();
    const plan::Cost price = plan::price(built, comm_.tree(), *profile);
    page.candidates.push_back({reduce.name(), price.total_ns, ""});
    if (kind != chosen) continue;
    page.plan = std::move(built);
    page.cost = price;
  }
  return page;
}

Result<ExpertPlans::Page> ExpertPlans::rows_page() const {
  Page page;
  const std::shared_ptr<const plan::Profile> profile = side_.selector.profile();
  MOECCL_ASSIGN_OR_RETURN(const ExpertRows chosen, choose_rows(false));
  for (const std::string name : ways()) {
    if (const Status applies = rows_run(name); !applies.ok()) {
      page.candidates.push_back({name, 0, applies.message()});
      continue;
    }
    MOECCL_ASSIGN_OR_RETURN(const ExpertRows rows, make_rows(name));
    algo::WholeRows all = whole(rows);
    const plan::Cost price = plan::price(all.plan, all.bindings, comm_.tree(), *profile);
    page.candidates.push_back({name, price.total_ns, ""});
    if (name != name_of(chosen)) continue;
    page.plan = std::move(all.plan);
    page.cost = price;
  }
  return page;
}

}  // namespace moeccl::comm
