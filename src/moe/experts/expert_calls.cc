// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_calls.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "src/algo/experts/gradient_reduce.h"
#include "src/algo/replica_move.h"
#include "src/algo/replica_reduce.h"
#include "src/algo/tuning.h"
#include "src/base/adopt.h"
#include "src/base/hash.h"
#include "src/comm/collective.h"
#include "src/moe/experts/expert_layers.h"
#include "src/plan/cost.h"
#include "src/plan/printer.h"

namespace moeccl::comm {
namespace {

// A call whose arguments have passed the checks.
struct Checked {
  algo::ReplicaPlacement placement;
  uint32_t element_bytes = 1;
  bool average = false;
};

Result<Checked> check_call(const Communicator& comm, const ExpertCall& call) {
  Checked c;
  c.element_bytes = static_cast<uint32_t>(moecclTypeSize(call.type));
  if (c.element_bytes == 0)
    return bad(call.op, "type", format("{}", static_cast<int>(call.type)), "a moecclDataType_t");
  if (plan::reduces(call.op) && call.reduce != moecclSum && call.reduce != moecclAvg)
    return bad(call.op, "op", format("{}", call.reduce), "moecclSum or moecclAvg");
  c.average = call.reduce == moecclAvg;
  MOECCL_ASSIGN_OR_RETURN(c.placement, read_placement(call.placement, comm.n_ranks()));
  MOECCL_TRY(check_expert_size(call, c.element_bytes, c.placement));
  return c;
}

Status check_buffers(const ExpertCall& call, uint64_t in_bytes, uint64_t out_bytes) {
  if (!call.places.shards.empty()) return {};  // join_layers() has checked them
  const bool reduces = call.op == moecclOpExpertAllReduce;
  const bool places = call.op == moecclOpPlaceWeights;
  if (in_bytes > 0 && call.in == nullptr)
    return bad(call.op, reduces ? "send" : places ? "shards" : "slots", "NULL", format("{} bytes", in_bytes));
  if (out_bytes > 0 && call.out == nullptr)
    return bad(call.op, reduces ? "recv" : places ? "slots" : "shards", "NULL", format("{} bytes", out_bytes));
  if (!overlap(call.in, in_bytes, call.out, out_bytes) || (reduces && call.in == call.out)) return {};
  return error(moecclInvalidArgument, "{}: the buffers overlap{}: give separate buffers", exec::op_name(call.op),
               reduces ? ", but send is not recv" : "");
}

// Where a call runs: the selector and the staging for its buffers' kind of memory.
struct Side {
  const Selector& selector;
  uint64_t staging_bytes;
  bool cuda;
  plan::Reach reach(bool reachable) const { return selector.shape_of(PlanKey{}, reachable).reach; }
};

Side side_of(Communicator& comm, bool cuda) {
  return {comm.selector_for(cuda), comm.fabric_for(cuda).half_bytes, cuda};
}

// Returns success, or why this kind cannot run the call. The kinds add in different orders, so a deterministic
// communicator has one: "nodes" where it can run, else "flat".
Status runs(algo::ReduceKind kind, const Communicator& comm, const Checked& c, const plan::Shape& shape) {
  using algo::ReduceKind;
  const auto can_run = [&](ReduceKind k) -> Status {
    MOECCL_TRY(algo::ReplicaReduce::applies(k, shape.reach, comm.tree()));
    return algo::ReplicaReduce(c.placement, shape, comm.tree(), k, c.average).fits();
  };
  if (comm.config().deterministic && kind != ReduceKind::kNodes) {
    const ReduceKind only = can_run(ReduceKind::kNodes).ok() ? ReduceKind::kNodes : ReduceKind::kFlat;
    if (kind != only)
      return error(moecclUnsupported, "a deterministic communicator adds in the order of {}",
                   algo::reduce_kind_name(only));
  }
  return can_run(kind);
}

// Returns why the forced kind does not run the call. Success: it does, or none is forced. A single rank copies,
// whatever the name.
Status obeys_force(const Communicator& comm, const Side& side, const Checked& c, const plan::Shape& shape) {
  using algo::ReduceKind;
  for (const ReduceKind kind : {ReduceKind::kDirect, ReduceKind::kNodes, ReduceKind::kFlat})
    if (side.selector.forced(moecclOpExpertAllReduce) == algo::reduce_kind_name(kind) && comm.n_ranks() > 1)
      return runs(kind, comm, c, shape);
  return {};
}

// Returns the forced kind if it can run, or else the cheapest. Without `decides`, the answer changes no later one.
Result<algo::ReduceKind> choose(Communicator& comm, const Side& side, const Checked& c, const plan::Shape& shape,
                                bool decides) {
  using algo::ReduceKind;
  const std::string& forced = side.selector.forced(moecclOpExpertAllReduce);
  Status why;
  std::vector<Selector::Offer> offers;
  std::vector<ReduceKind> kinds;
  for (const ReduceKind kind : {ReduceKind::kDirect, ReduceKind::kNodes, ReduceKind::kFlat}) {
    if (Status applies = runs(kind, comm, c, shape); !applies.ok()) {
      why = std::move(applies);
      continue;
    }
    if (forced == algo::reduce_kind_name(kind)) return kind;
    kinds.push_back(kind);
    offers.push_back({algo::reduce_kind_name(kind), [&, kind] {
                        return algo::ReplicaReduce(c.placement, shape, comm.tree(), kind, c.average).build_all();
                      }});
  }
  if (kinds.empty()) return why;
  // Placements of one class differ in where replicas are, which changes prices less than sizes do.
  uint64_t slots = 0;
  for (uint32_t r = 0; r < comm.n_ranks(); ++r) slots += c.placement.n_slots(r);
  uint64_t problem = hash_combine(static_cast<uint64_t>(moecclOpExpertAllReduce), c.placement.n_experts);
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(slots)));
  problem = hash_combine(problem, static_cast<uint64_t>(std::bit_width(shape.count * shape.element_bytes)));
  problem = hash_combine(problem, plan::reach_bits(shape.reach.staging, shape.reach.views, shape.reach.reads));
  problem = hash_combine(problem, kinds.size() * 2 + (kinds[0] == ReduceKind::kDirect ? 1 : 0));
  const char* best = side.selector.cheapest(problem, offers, decides);
  for (size_t i = 0; i < kinds.size(); ++i)
    if (offers[i].name == best) return kinds[i];
  return kinds[0];
}

// Fills one choice. `reachable` assumes that every rank's buffers turn out to be reachable.
Status build_reduce(Communicator& comm, const Side& side, const ExpertCall& call, const Checked& c, bool reachable,
                    plan::Program& program, exec::Choice& choice) {
  const plan::Reach reach = side.reach(reachable);
  const plan::Shape shape = algo::replica_shape(c.placement, call.count, c.element_bytes, reach, side.staging_bytes);
  MOECCL_ASSIGN_OR_RETURN(const algo::ReduceKind kind, choose(comm, side, c, shape, true));
  const algo::ReplicaReduce plan(c.placement, shape, comm.tree(), kind, c.average);
  MOECCL_TRY(plan.fits());
  program = plan.build(comm.rank());
  choice = {&program, plan.chunking(), plan.name(), plan.hash()};
  return {};
}

uint32_t slots_of(const moecclPlacement_t& p, uint32_t rank) {
  return static_cast<uint32_t>(p.slot_counts != nullptr ? p.slot_counts[rank] : p.slots_per_rank);
}

// The plan of a call on this rank with everything that determines it; operations keep it alive. A placement often stays
// the same between steps, and a plan of many experts takes longer to check and to build than a small one takes to run.
struct Kept {
  bool cuda = false;
  moecclDataType_t type = moecclInt8;
  moecclRedOp_t reduce = moecclSum;
  size_t count = 0;
  uint64_t staging_bytes = 0;
  uint64_t plans = 0;  // Selector::version()
  bool asks_reach = false;
  int32_t n_experts = 0;
  std::vector<uint32_t> slots;       // [n_ranks]
  std::vector<int32_t> slot_expert;  // rank after rank
  std::vector<uint64_t> slot_first, shard_first;

  plan::Program program, reachable;
  algo::BoundRows moved;  // replaces the programs for calls that move rows
  exec::Choice choice, if_reachable;
  plan::Binding binding;
  bool asks = false;  // asks for the peers' buffers before it chooses
  uint64_t in_bytes = 0, out_bytes = 0;

  bool serves(const Side& side, const ExpertCall& call) const {
    if (side.cuda != cuda || call.type != type || call.reduce != reduce || call.count != count) return false;
    if (!std::ranges::equal(call.places.slots, slot_first) || !std::ranges::equal(call.places.shards, shard_first))
      return false;
    const moecclPlacement_t& p = *call.placement;
    if (p.n_experts != n_experts || p.slot_expert == nullptr) return false;
    if (staging_bytes != side.staging_bytes || plans != side.selector.version()) return false;
    for (uint32_t r = 0; r < slots.size(); ++r)
      if (slots_of(p, r) != slots[r]) return false;
    return std::equal(slot_expert.begin(), slot_expert.end(), p.slot_expert);
  }
};

// Logs why a forced algorithm does not run the call.
void warn_of_force(const Side& side, const ExpertCall& call, const Checked& c, const Status& why,
                   const std::string& instead) {
  const uint64_t bytes = call.count * c.element_bytes;
  side.selector.warn_of_force(call.op, static_cast<uint64_t>(std::bit_width(bytes)),
                              format("{} is forced but does not apply to experts of {} bytes: {}; {} runs instead",
                                     side.selector.forced(call.op), bytes, why.message(), instead));
}

Status keep_reduce(Communicator& comm, const Side& side, const ExpertCall& call, const Checked& c, Kept& kept) {
  MOECCL_TRY(build_reduce(comm, side, call, c, false, kept.program, kept.choice));
  kept.binding.count = call.count;
  kept.in_bytes = kept.out_bytes = c.placement.n_slots(comm.rank()) * call.count * c.element_bytes;
  const uint64_t most_bytes = c.placement.most_slots() * call.count * c.element_bytes;
  const std::string& forced = side.selector.forced(call.op);
  const Status follows =
      obeys_force(comm, side, c,
                  algo::replica_shape(c.placement, call.count, c.element_bytes, side.reach(false), side.staging_bytes));
  const bool may_reach = forced.empty() || !follows.ok() || forced == algo::reduce_kind_name(algo::ReduceKind::kDirect);
  kept.asks = may_reach && kept.asks_reach && most_bytes >= algo::tuning::kAskReach && comm.n_ranks() > 1;
  if (kept.asks) MOECCL_TRY(build_reduce(comm, side, call, c, true, kept.reachable, kept.if_reachable));
  const bool in_heap = kept.asks && forced == kept.if_reachable.algorithm;
  if (!follows.ok())
    warn_of_force(side, call, c, follows,
                  format("{}{}", kept.choice.algorithm,
                         in_heap ? format(", and {} where all buffers come from moecclMemAlloc,", forced) : ""));
  return {};
}

// Returns the plan of a call that moves rows.
Result<algo::ReplicaMove> move_of(Communicator& comm, const Side& side, const ExpertCall& call, const Checked& c) {
  return algo::ReplicaMove::make(c.placement, comm.tree(),
                                 {call.op, call.count, c.element_bytes, side.reach(false), side.staging_bytes});
}
// Sets *follows to why the forced way does not run the call.
Result<algo::GradientReduce> sum_of(Communicator& comm, const Side& side, const ExpertCall& call, const Checked& c,
                                    Status* follows) {
  using Way = algo::GradientReduce::Way;
  const auto make = [&](Way way) {
    return algo::GradientReduce::make(
        c.placement, comm.tree(), {call.count, c.element_bytes, c.average, side.reach(false), side.staging_bytes, way});
  };
  const std::string& forced = side.selector.forced(call.op);
  if (!forced.empty() && comm.config().deterministic) {
    *follows = error(moecclUnsupported, "a deterministic communicator adds in the order that the placement gives");
  } else if (!forced.empty()) {
    Result<algo::GradientReduce> made = make(forced == "direct" ? Way::kDirect : Way::kNodes);
    if (made.ok()) return made;
    if (comm.n_ranks() > 1) *follows = made.status();
  }
  Result<algo::GradientReduce> made = make(Way::kFewerBytes);
  if (made.ok()) return made;
  // The way of fewer bytes may need more staging than the other one.
  for (const Way way : {Way::kDirect, Way::kNodes})
    if (Result<algo::GradientReduce> other = make(way); other.ok()) return other;
  return made;
}

template <class Rows>
void keep_rows(Communicator& comm, const ExpertCall& call, const Checked& c, const Rows& plan, Kept& kept) {
  kept.in_bytes = plan.input_elements(comm.rank()) * c.element_bytes;
  kept.out_bytes = plan.output_elements(comm.rank()) * c.element_bytes;
  kept.moved = plan.build(comm.rank(), call.places);
  kept.choice = {&kept.moved.program, plan.chunking(), plan.name(), plan.hash()};
  kept.binding = kept.moved.binding;
}

Result<std::shared_ptr<const Kept>> keep(Communicator& comm, const Side& side, const ExpertCall& call) {
  MOECCL_ASSIGN_OR_RETURN(const Checked c, check_call(comm, call));
  auto kept = std::make_shared<Kept>();
  kept->cuda = side.cuda;
  kept->type = call.type;
  kept->reduce = call.reduce;
  kept->count = call.count;
  kept->staging_bytes = side.staging_bytes;
  kept->plans = side.selector.version();
  kept->asks_reach = side.selector.asks_reach();
  kept->n_experts = call.placement->n_experts;
  for (uint32_t r = 0; r < comm.n_ranks(); ++r) kept->slots.push_back(c.placement.n_slots(r));
  kept->slot_expert = c.placement.slot_expert;
  kept->slot_first.assign(call.places.slots.begin(), call.places.slots.end());
  kept->shard_first.assign(call.places.shards.begin(), call.places.shards.end());
  if (call.op == moecclOpExpertAllReduce) {
    MOECCL_TRY(keep_reduce(comm, side, call, c, *kept));
  } else if (call.op == moecclOpReduceGradients) {
    Status follows;
    MOECCL_ASSIGN_OR_RETURN(const algo::GradientReduce plan, sum_of(comm, side, call, c, &follows));
    keep_rows(comm, call, c, plan, *kept);
    if (!follows.ok()) warn_of_force(side, call, c, follows, plan.name());
  } else {
    MOECCL_ASSIGN_OR_RETURN(const algo::ReplicaMove plan, move_of(comm, side, call, c));
    keep_rows(comm, call, c, plan, *kept);
  }
  return std::shared_ptr<const Kept>(std::move(kept));
}

}  // namespace

Result<algo::ReplicaPlacement> read_placement(const moecclPlacement_t* placement, uint32_t n_ranks) {
  MOECCL_ASSIGN_OR_RETURN(const moecclPlacement_t given, adopt(placement, "placement"));
  if (given.n_experts < 1) return error(moecclInvalidArgument, "n_experts is {}: give 1 or more", given.n_experts);
  constexpr int32_t kMostSlots = 1 << 15;  // of a rank: slots are 16-bit numbers in plans
  std::vector<uint32_t> slots(n_ranks);
  uint64_t total = 0;
  for (uint32_t r = 0; r < n_ranks; ++r) {
    const auto n = static_cast<int32_t>(slots_of(given, r));
    if (n < 0 || n > kMostSlots)
      return error(moecclInvalidArgument, "{} is {}: give 0 to {}",
                   given.slot_counts != nullptr ? format("slot_counts[{}]", r) : "slots_per_rank", n, kMostSlots);
    slots[r] = static_cast<uint32_t>(n);
    total += slots[r];
  }
  if (given.slot_expert == nullptr && total > 0)
    return error(moecclInvalidArgument, "slot_expert is NULL: give the experts of {} slots", total);
  return algo::ReplicaPlacement::make(static_cast<uint32_t>(given.n_experts), slots, {given.slot_expert, total});
}

Status check_expert_size(const ExpertCall& call, size_t element_bytes, const algo::ReplicaPlacement& placement) {
  const uint64_t rows = std::max<uint64_t>(placement.slot_expert.size(), placement.n_experts);
  if (call.count <= kMostExpertElements && fits_in_memory(call.count, element_bytes, rows)) return {};
  return bad(call.op, "count", format("{}", call.count), "a size that fits in memory");
}

Status prepare_expert_call(Communicator& comm, const ExpertCall& asked, exec::Operation& op) {
  MOECCL_TRY(comm.usable());
  MOECCL_ASSIGN_OR_RETURN(const moecclPlacement_t placement, adopt(asked.placement, "placement"));
  ExpertCall call = asked;
  call.placement = &placement;
  // Passes the pointers as given, even to empty buffers: they tell the kind of memory of a rank without slots.
  MOECCL_ASSIGN_OR_RETURN(op.runner, comm.place(call.in, call.out));
  const Side side = side_of(comm, op.on_device());
  std::shared_ptr<const void>& place = comm.kept_plan(call.op);
  auto kept = std::static_pointer_cast<const Kept>(place);
  if (kept == nullptr || !kept->serves(side, call)) {
    MOECCL_ASSIGN_OR_RETURN(kept, keep(comm, side, call));
    place = kept;
  }
  MOECCL_TRY(check_buffers(call, kept->in_bytes, kept->out_bytes));
  if (op.on_device() && call.op == moecclOpExpertAllReduce) {  // the others move rows through staging
    MOECCL_TRY(comm.cuda()->open_to_peers(call.in, kept->in_bytes));
    if (call.out != call.in) MOECCL_TRY(comm.cuda()->open_to_peers(call.out, kept->out_bytes));
  }
  op.signature.op = call.op;
  op.priority = comm.priority_of(call.op);
  op.signature.type = call.type;
  op.signature.count = call.count;
  op.signature.plan = kept->choice.plan_hash;
  op.choice = kept->choice;
  op.binding = kept->binding;
  if (plan::reduces(call.op)) op.signature.reduce = static_cast<uint8_t>(call.reduce);
  if (kept->asks) {
    op.if_reachable = &kept->if_reachable;
    op.signature.plan = hash_combine(op.signature.plan, kept->if_reachable.plan_hash);
  }
  op.input = call.in;
  op.output = call.out;
  op.output_bytes = kept->out_bytes;
  op.element_bytes = moecclTypeSize(call.type);
  op.keep = std::move(kept);
  return {};
}

Status prepare_expert_layers(Communicator& comm, const ExpertCall& asked, std::span<const moecclExpertLayer_t> layers,
                             exec::Operation& op) {
  MOECCL_TRY(comm.usable());
  if (asked.op != moecclOpReduceGradients && asked.op != moecclOpCollectGradients && asked.op != moecclOpPlaceWeights)
    return error(moecclInvalidArgument,
                 "what is {}: give moecclOpReduceGradients, moecclOpCollectGradients or moecclOpPlaceWeights",
                 static_cast<int>(asked.op));
  if (layers.empty()) return error(moecclInvalidArgument, "n_layers is 0: give 1 or more");
  if (layers.data() == nullptr) return error(moecclInvalidArgument, "layers is NULL: give {} layers", layers.size());
  const size_t element_bytes = moecclTypeSize(asked.type);
  if (element_bytes == 0)
    return bad(asked.op, "type", format("{}", static_cast<int>(asked.type)), "a moecclDataType_t");
  MOECCL_ASSIGN_OR_RETURN(const ExpertLayers joined, join_layers(comm, asked, layers, element_bytes));
  const moecclPlacement_t placement = joined.placement();
  const bool places = asked.op == moecclOpPlaceWeights;
  ExpertCall call = asked;
  call.placement = &placement;
  call.in = places ? joined.shards : joined.slots;
  call.out = places ? joined.slots : joined.shards;
  call.places = {joined.slot_first, joined.shard_first};
  return prepare_expert_call(comm, call, op);
}

Result<std::string> explain_expert_call(Communicator& comm, const ExpertCall& call) {
  const bool reduces = call.op == moecclOpReduceGradients;
  if ((call.op < moecclOpExpertAllReduce || call.op > moecclOpPlaceWeights) && !reduces)
    return error(moecclInvalidArgument,
                 "op is {}: give moecclOpExpertAllReduce, CollectGradients, ReduceGradients or PlaceWeights",
                 static_cast<int>(call.op));
  MOECCL_ASSIGN_OR_RETURN(const Checked c, check_call(comm, call));
  const Side side = side_of(comm, false);
  const std::shared_ptr<const plan::Profile> profile = side.selector.profile();
  std::vector<plan::PlanCandidate> candidates;
  plan::Plan plan;
  plan::Cost cost;
  Status follows;
  if (call.op == moecclOpExpertAllReduce) {
    const plan::Reach reach = side.reach(false);
    const plan::Shape shape = algo::replica_shape(c.placement, call.count, c.element_bytes, reach, side.staging_bytes);
    MOECCL_ASSIGN_OR_RETURN(const algo::ReduceKind chosen, choose(comm, side, c, shape, false));
    follows = obeys_force(comm, side, c, shape);
    for (const auto kind : {algo::ReduceKind::kDirect, algo::ReduceKind::kFlat, algo::ReduceKind::kNodes}) {
      const algo::ReplicaReduce reduce(c.placement, shape, comm.tree(), kind, c.average);
      if (const Status applies = runs(kind, comm, c, shape); !applies.ok()) {
        candidates.push_back({reduce.name(), 0, applies.message()});
        continue;
      }
      plan::Plan built = reduce.build_all();
      const plan::Cost price = plan::price(built, comm.tree(), *profile);
      candidates.push_back({reduce.name(), price.total_ns, ""});
      if (kind != chosen) continue;
      plan = std::move(built);
      cost = price;
    }
    if (plan.programs.empty())
      return error(moecclUnsupported, "expert_allreduce does not fit: {}", candidates.back().refusal);
  } else {
    std::vector<algo::BoundRows> bound;
    const auto build = [&](const auto& rows) {
      plan.algorithm = rows.name();
      plan.shape = rows.shape();
      plan.chunking = rows.chunking();
      plan.hash = rows.hash();
      for (uint32_t r = 0; r < comm.n_ranks(); ++r) bound.push_back(rows.build(r));
    };
    if (reduces) {
      MOECCL_ASSIGN_OR_RETURN(const algo::GradientReduce sum, sum_of(comm, side, call, c, &follows));
      build(sum);
    } else {
      MOECCL_ASSIGN_OR_RETURN(const algo::ReplicaMove move, move_of(comm, side, call, c));
      build(move);
    }
    std::vector<plan::Binding> bindings;
    for (const algo::BoundRows& one : bound) {
      plan.programs.push_back(one.program);
      bindings.push_back(one.binding);
    }
    cost = plan::price(plan, bindings, comm.tree(), *profile);
  }
  const std::string& forced = side.selector.forced(call.op);
  const std::string why =
      follows.ok() ? plan.algorithm == forced ? "forced by moecclPlanForce or MOECCL_PLAN" : "for this placement"
                   : format("for this placement; {} is forced but does not apply: {}", forced, follows.message());
  return plan::explain({plan, comm.tree(), cost, comm.rank(), why, candidates, 0, comm.paced()}) +
         format("Figures: {}.\n", plan::figures_text(*profile, comm.tree()));
}

}  // namespace moeccl::comm
