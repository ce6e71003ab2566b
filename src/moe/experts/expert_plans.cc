// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_plans.h"

#include <algorithm>
#include <bit>

#include "src/algo/experts/prove_experts.h"
#include "src/base/hash.h"
#include "src/comm/prove_if_asked.h"

namespace moeccl::comm {
namespace {

using algo::GradientReduce;
using algo::ReduceKind;
using algo::ReplicaMove;
using algo::ReplicaReduce;

constexpr ReduceKind kKinds[] = {ReduceKind::kDirect, ReduceKind::kNodes, ReduceKind::kFlat};

algo::WholeRows whole(const ExpertRows& rows) {
  return std::visit([](const auto& r) { return algo::whole_rows(r); }, rows);
}

}  // namespace

ReduceKind ExpertPlans::kind_of(std::string_view name) {
  return *std::ranges::find(kKinds, name, algo::reduce_kind_name);
}

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

// Two terms have one sum, whichever rank adds them, but not one mean: ways divide before or after they round.
uint32_t ExpertPlans::bits(uint32_t number) const {
  if (call_.average) return number;
  for (uint32_t e = 0; e < call_.placement.n_experts; ++e)
    if (call_.placement.n_replicas(e) > 2) return number;
  return 0;
}

std::vector<Way> ExpertPlans::reduce_ways(bool reachable) const {
  const plan::Shape shape = reduce_shape(reachable);
  std::vector<Way> ways;
  for (const ReduceKind kind : kKinds)
    ways.push_back({algo::reduce_kind_name(kind), runs(kind, shape),
                    [this, kind, shape] {
                      const ReplicaReduce reduce(call_.placement, shape, comm_.tree(), kind, call_.average);
                      return whole_blocks(reduce.build_all());
                    },
                    bits(static_cast<uint32_t>(kind))});
  return ways;
}

// Both ways of ReduceGradients add in different orders, so a deterministic communicator has the one that the placement
// gives, and the other only where that does not fit.
std::vector<Way> ExpertPlans::row_ways() const {
  const Status nodes = algo::needs_nodes(reduce_shape(false), comm_.tree());
  std::vector<const char*> names = {"direct"};
  if (call_.op != moecclOpCollectGradients) {
    const bool nodes_first =
        call_.op == moecclOpPlaceWeights ? nodes.ok() : GradientReduce::nodes_save_bytes(call_.placement, comm_.tree());
    names.insert(nodes_first ? names.begin() : names.end(), "nodes");
  }
  const bool one_order = call_.op == moecclOpReduceGradients && comm_.config().deterministic;
  std::vector<Way> ways;
  for (const char* name : names) {
    Status applies = std::string_view(name) == "nodes" ? nodes : Status();
    if (one_order && !ways.empty() && make_rows(names[0]).ok())
      applies = error(moecclUnsupported, "a deterministic communicator adds in the order that the placement gives");
    ways.push_back({name, std::move(applies),
                    [this, name]() -> Result<algo::WholeRows> {
                      MOECCL_ASSIGN_OR_RETURN(const ExpertRows rows, make_rows(name));
                      return whole(rows);
                    },
                    call_.op == moecclOpReduceGradients ? bits(std::string_view(name) == "nodes" ? 1 : 0) : 0});
  }
  return ways;
}

std::vector<Way> ExpertPlans::ways(bool reachable) const {
  return call_.op == moecclOpExpertAllReduce ? reduce_ways(reachable) : row_ways();
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

Status ExpertPlans::obeys_force() const {
  const std::string& forced = side_.selector.forced(call_.op);
  if (forced.empty() || comm_.n_ranks() == 1) return {};
  for (const Way& way : ways(false))
    if (way.name == forced && !way.applies.ok()) return way.applies;
  return call_.op == moecclOpExpertAllReduce ? Status() : make_rows(forced).status();
}

uint64_t ExpertPlans::most_bytes() const {
  const uint64_t slots = uint64_t{call_.placement.most_slots()} * call_.count;
  const uint64_t shards = call_.placement.n_experts * algo::shard_elements(call_.count, comm_.n_ranks());
  return std::max(slots, call_.op == moecclOpExpertAllReduce ? 0 : shards) * call_.element_bytes;
}

// Placements of one class differ in where replicas are, which changes prices less than sizes do. Plans for the
// symmetric heap are not tried.
WayOrder ExpertPlans::order(bool reachable, bool decides) const {
  const plan::Reach reach = side_.reach(reachable);
  uint64_t slots = 0;
  for (uint32_t r = 0; r < comm_.n_ranks(); ++r) slots += call_.placement.n_slots(r);
  uint64_t problem = hash_combine(static_cast<uint64_t>(call_.op), call_.placement.n_experts);
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(slots)));
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(call_.count * call_.element_bytes)));
  problem = hash_combine(problem, plan::reach_bits(reach.staging, reach.views, reach.reads));
  return in_order(side_.selector, side_.selector.forced(call_.op),
                  {problem, reachable || side_.cuda ? 0 : most_bytes(), decides}, ways(reachable));
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

Result<WaysPage> ExpertPlans::page(const WayOrder& order) const {
  if (order.names.empty()) return none_applies();
  const auto runs = [&](const char* name) -> Result<const char*> {
    if (call_.op != moecclOpExpertAllReduce) MOECCL_TRY(make_rows(name).status());
    return name;
  };
  MOECCL_ASSIGN_OR_RETURN(const char* const now, make_first(order.as_now(), runs));
  return page_of(side_.selector, ways(false), now);
}

}  // namespace moeccl::comm
