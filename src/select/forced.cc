// SPDX-License-Identifier: Apache-2.0
// Forced choices: which names can be forced, where they apply, and the warnings where they give way.
#include "src/algo/experts/expert_exchange.h"
#include "src/algo/replica_reduce.h"
#include "src/base/hash.h"
#include "src/base/log.h"
#include "src/base/text.h"
#include "src/select/selection.h"

namespace moeccl::comm {
namespace {

// Returns why no communicator knows the name, whatever its topology.
Status check_name(moecclOp_t op, const std::string& algorithm) {
  const std::string_view name = algorithm;
  if (op == moecclOpDispatch) {
    const bool hier = name.starts_with("hier:") && name.size() == 6 && name[5] >= '1' && name[5] <= '9';
    if (hier || name == "flat" || name == "2dh") return {};
    return error(moecclInvalidArgument, "no algorithm \"{}\" for dispatch: there are flat, 2dh, hier:1, hier:2, ...",
                 algorithm);
  }
  if (op == moecclOpCombine)
    return error(moecclInvalidArgument, "combine takes the way of its dispatch: force \"{}\" for dispatch", algorithm);
  const std::string names = algo::names_of(op, ",");
  if (names.empty())
    return error(moecclInvalidArgument, "{} has one plan: there is no algorithm to force", exec::op_name(op));
  for (const std::string_view known : comma_items(names))
    if (name == known) return {};
  return error(moecclInvalidArgument, "no algorithm \"{}\" for {}: there are {}", algorithm, exec::op_name(op),
               algo::names_of(op, ", "));
}

}  // namespace

Status Selector::force_from_text(const std::string& text) {
  for (const std::string_view item : comma_items(text)) {
    const size_t colon = item.find(':');
    const moecclOp_t op = plan::parse_op(item.substr(0, colon));
    if (colon == std::string_view::npos || op == MOECCL_NUM_OPS) {
      return error(moecclInvalidArgument,
                   "MOECCL_PLAN: \"{}\" at position {} is not operation:algorithm, such as allreduce:ring", item,
                   item.data() - text.data());
    }
    const std::string algorithm(item.substr(colon + 1));
    MOECCL_TRY(force(op, algorithm));
    if (const Status never = can_ever_run(op, algorithm); !never.ok())
      log(at_.rank == 0 ? LogLevel::kWarn : LogLevel::kInfo, "MOECCL_PLAN is not followed here: {}", never.message());
  }
  return {};
}

Status Selector::force(moecclOp_t op, const std::string& algorithm) {
  const bool automatic = algorithm.empty() || algorithm == "auto";
  if (!automatic) MOECCL_TRY(check_name(op, algorithm));
  const std::lock_guard lock(mutex_);
  forced_[op] = automatic ? "" : algorithm;
  warned_.clear();
  forget_choices();
  return {};
}

Status Selector::applies_to(const plan::Shape& shape, const std::string& algorithm) const {
  const algo::Algorithm* a = algo::find(shape.op, algorithm);
  if (a != nullptr) return a->applies(shape, at_.tree);
  // Plans of a routing or a placement. Other names were not accepted, or there is none.
  using algo::ReduceKind;
  using Way = algo::ExpertExchange::Way;
  if (shape.op == moecclOpDispatch && check_name(shape.op, algorithm).ok())
    return algo::parse_moe_algorithm(algorithm, at_.tree).status();
  if ((shape.op == moecclOpReduceGradients || shape.op == moecclOpPlaceWeights) && algorithm == "nodes")
    return algo::needs_nodes(shape, at_.tree);
  if ((shape.op == moecclOpExpertGather || shape.op == moecclOpExpertReduce) && algorithm == "direct")
    return algo::ExpertExchangePlan::applies(shape.op, Way::kDirect, at_.reach, at_.deterministic);
  if (shape.op == moecclOpExpertAllReduce)
    for (const ReduceKind kind : {ReduceKind::kDirect, ReduceKind::kNodes, ReduceKind::kFlat})
      if (algorithm == algo::reduce_kind_name(kind)) return algo::ReplicaReduce::applies(kind, shape.reach, at_.tree);
  return {};
}

Status Selector::can_ever_run(moecclOp_t op, const std::string& algorithm) const {
  // A single rank copies, whatever the name. Its layers have the levels of its topology.
  if (at_.tree.n_ranks == 1 && op != moecclOpDispatch) return {};
  // An algorithm that fits at all fits for one byte.
  const PlanKey least{op, 0, 1, 1, false};
  const Status ordinary = applies_to(shape_of(least, false), algorithm);
  if (ordinary.ok() || (at_.heap_reach && applies_to(shape_of(least, true), algorithm).ok())) return {};
  return error(moecclUnsupported, "{} can never run {} on this communicator: {}", algorithm, exec::op_name(op),
               ordinary.message());
}

Status Selector::obeys_force(const plan::Shape& shape) const {
  const std::lock_guard lock(mutex_);
  return obeys(shape);
}

Status Selector::obeys(const plan::Shape& shape) const {
  const algo::Algorithm* a = forced_[shape.op].empty() ? nullptr : algo::find(shape.op, forced_[shape.op]);
  return a == nullptr ? Status() : a->applies(shape, at_.tree);
}

void Selector::warn_of_force(moecclOp_t op, uint64_t problem_class, const std::string& sentence) const {
  {
    const std::lock_guard lock(mutex_);
    if (!warned_.insert(hash_combine(static_cast<uint64_t>(op), problem_class)).second) return;
  }
  log(at_.rank == 0 ? LogLevel::kWarn : LogLevel::kInfo, "{}: {}", exec::op_name(op), sentence);
}

}  // namespace moeccl::comm
