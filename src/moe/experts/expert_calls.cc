// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_calls.h"

#include <algorithm>
#include <bit>
#include <memory>

#include "src/algo/tuning.h"
#include "src/base/adopt.h"
#include "src/base/hash.h"
#include "src/comm/collective.h"
#include "src/moe/experts/expert_layers.h"
#include "src/moe/experts/expert_plans.h"

namespace moeccl::comm {
namespace {

Result<CheckedCall> check_call(const Communicator& comm, const ExpertCall& call) {
  CheckedCall c;
  c.op = call.op;
  c.count = call.count;
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

Side side_of(Communicator& comm, bool cuda) {
  return {comm.selector_for(cuda), comm.fabric_for(cuda).half_bytes, cuda};
}

// What determines the plan of a call, besides the state of the communicator.
struct Asked {
  CheckedCall call;
  std::vector<uint64_t> slot_first, shard_first;  // of several layers
};

// A plan that moves rows, with the lists that its steps name.
struct RowSlot : PlanSlot {
  algo::BoundRows moved;
};

uint64_t signature_of(const PlanSlot& slot) {
  const uint64_t plan = slot.choice.plan_hash;
  return slot.asks_reach ? hash_combine(plan, slot.choice_if_reachable.plan_hash) : plan;
}

Status build_reduce(const Communicator& comm, const ExpertPlans& plans, const CheckedCall& c, const char* name,
                    bool reachable, plan::Plan& built, exec::Choice& choice) {
  const plan::Shape shape = plans.reduce_shape(reachable);
  const algo::ReduceKind kind = ExpertPlans::kind_of(name);
  const algo::ReplicaReduce plan(c.placement, shape, comm.tree(), kind, c.average);
  MOECCL_TRY(plan.fits());
  MOECCL_TRY(plans.check_reduce(kind, reachable));
  built.programs.push_back(plan.build(comm.rank()));
  choice = {&built.programs.back(), plan.chunking(), plan.name(), plan.hash()};
  return {};
}

Result<std::shared_ptr<PlanSlot>> build_rows(const Communicator& comm, const ExpertPlans& plans, const Asked& asked,
                                             const char* name) {
  MOECCL_ASSIGN_OR_RETURN(const ExpertRows chosen, plans.make_rows(name));
  MOECCL_TRY(plans.check_rows(name));
  const auto slot = std::make_shared<RowSlot>();
  std::visit(
      [&](const auto& rows) {
        slot->moved = rows.build(comm.rank(), {asked.slot_first, asked.shard_first});
        slot->choice = {&slot->moved.program, rows.chunking(), rows.name(), rows.hash()};
      },
      chosen);
  slot->binding = &slot->moved.binding;
  return std::shared_ptr<PlanSlot>(slot);
}

// Builds one way of the call.
Result<std::shared_ptr<PlanSlot>> build(const Communicator& comm, const ExpertPlans& plans, const Asked& asked,
                                        const char* name) {
  std::shared_ptr<PlanSlot> slot;
  if (asked.call.op == moecclOpExpertAllReduce) {
    slot = std::make_shared<PlanSlot>();
    MOECCL_TRY(build_reduce(comm, plans, asked.call, name, false, slot->staged, slot->choice));
  } else {
    MOECCL_ASSIGN_OR_RETURN(slot, build_rows(comm, plans, asked, name));
  }
  slot->key = {asked.call.op, 0, asked.call.count, asked.call.element_bytes, false};
  slot->signature = signature_of(*slot);
  return slot;
}

uint32_t slots_of(const moecclPlacement_t& p, uint32_t rank) {
  return static_cast<uint32_t>(p.slot_counts != nullptr ? p.slot_counts[rank] : p.slots_per_rank);
}

// The plan of a call on this rank with everything that determines it. A placement often stays the same between steps,
// and a plan of many experts takes longer to check and to build than a small one takes to run.
struct Kept {
  bool cuda = false;
  moecclDataType_t type = moecclInt8;
  moecclRedOp_t reduce = moecclSum;
  uint64_t staging_bytes = 0;
  uint64_t plans = 0;  // Selector::version()
  std::shared_ptr<const Asked> asked;
  std::shared_ptr<PlanSlot> slot;
  uint64_t in_bytes = 0, out_bytes = 0;

  bool serves(const Side& side, const ExpertCall& call) const {
    if (side.cuda != cuda || call.type != type || call.reduce != reduce || call.count != asked->call.count)
      return false;
    if (!std::ranges::equal(call.places.slots, asked->slot_first) ||
        !std::ranges::equal(call.places.shards, asked->shard_first))
      return false;
    const moecclPlacement_t& p = *call.placement;
    const algo::ReplicaPlacement& known = asked->call.placement;
    if (p.n_experts != static_cast<int32_t>(known.n_experts) || p.slot_expert == nullptr) return false;
    if (staging_bytes != side.staging_bytes || plans != side.selector.version()) return false;
    for (uint32_t r = 0; r + 1 < known.first_slot.size(); ++r)
      if (slots_of(p, r) != known.n_slots(r)) return false;
    return std::equal(known.slot_expert.begin(), known.slot_expert.end(), p.slot_expert);
  }
};

// Logs why a forced algorithm does not run the call.
void warn_of_force(const Side& side, const CheckedCall& c, const Status& why, const std::string& instead) {
  const uint64_t bytes = c.count * c.element_bytes;
  warn_of_force(side.selector, c.op, static_cast<uint64_t>(std::bit_width(bytes)), bytes, why, instead);
}

// Sums over buffers of the symmetric heap run by price alone.
Status add_reachable(const Communicator& comm, const Side& side, const ExpertPlans& plans, const CheckedCall& c,
                     const Status& follows, PlanSlot& slot) {
  const uint64_t most_bytes = c.placement.most_slots() * c.count * c.element_bytes;
  const std::string& forced = side.selector.forced(c.op);
  const bool may_reach = forced.empty() || !follows.ok() || forced == algo::reduce_kind_name(algo::ReduceKind::kDirect);
  slot.asks_reach =
      may_reach && side.selector.asks_reach() && most_bytes >= algo::tuning::kAskReach && comm.n_ranks() > 1;
  if (!slot.asks_reach) return {};
  const WayOrder order = plans.order(true, true);
  MOECCL_TRY(build_reduce(comm, plans, c, order.names[0], true, slot.reachable, slot.choice_if_reachable));
  slot.signature = signature_of(slot);
  return {};
}

Result<std::shared_ptr<PlanSlot>> make_slot(Communicator& comm, const Side& side,
                                            const std::shared_ptr<const Asked>& asked) {
  const CheckedCall& c = asked->call;
  const ExpertPlans plans(comm, side, c);
  const WayOrder order = plans.order(false, true);
  if (order.names.empty()) return plans.none_applies();
  const auto make = [&](const char* name) { return build(comm, plans, *asked, name); };
  MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> slot, make_first(order.as_next(), make));
  const Status follows = plans.obeys_force();
  if (c.op == moecclOpExpertAllReduce) MOECCL_TRY(add_reachable(comm, side, plans, c, follows, *slot));
  order.enter(*slot, [&comm, asked](const PlanSlot& of, const char* name) -> Result<std::shared_ptr<PlanSlot>> {
    const Side host = side_of(comm, false);
    MOECCL_ASSIGN_OR_RETURN(std::shared_ptr<PlanSlot> other,
                            build(comm, ExpertPlans(comm, host, asked->call), *asked, name));
    other->asks_reach = of.asks_reach;
    other->choice_if_reachable = of.choice_if_reachable;
    other->signature = signature_of(*other);
    return other;
  });
  if (!follows.ok()) {
    const bool in_heap = slot->asks_reach && side.selector.forced(c.op) == slot->choice_if_reachable.algorithm;
    warn_of_force(side, c, follows,
                  format("{}{}", slot->choice.algorithm,
                         in_heap ? format(", and {} where all buffers come from moecclMemAlloc,",
                                          slot->choice_if_reachable.algorithm)
                                 : ""));
  }
  return slot;
}

// Everything but the plan.
Result<std::shared_ptr<Kept>> checked(const Communicator& comm, const Side& side, const ExpertCall& call) {
  auto asked = std::make_shared<Asked>();
  MOECCL_ASSIGN_OR_RETURN(asked->call, check_call(comm, call));
  asked->slot_first.assign(call.places.slots.begin(), call.places.slots.end());
  asked->shard_first.assign(call.places.shards.begin(), call.places.shards.end());
  auto kept = std::make_shared<Kept>();
  kept->cuda = side.cuda;
  kept->type = call.type;
  kept->reduce = call.reduce;
  kept->staging_bytes = side.staging_bytes;
  kept->plans = side.selector.version();
  kept->asked = asked;
  const CheckedCall& c = asked->call;
  const uint64_t slots = uint64_t{c.placement.n_slots(comm.rank())} * c.count * c.element_bytes;
  const uint64_t shards = c.placement.n_experts * algo::shard_elements(c.count, comm.n_ranks()) * c.element_bytes;
  kept->in_bytes = c.op == moecclOpPlaceWeights ? shards : slots;
  kept->out_bytes = c.op == moecclOpPlaceWeights || c.op == moecclOpExpertAllReduce ? slots : shards;
  return kept;
}

}  // namespace

Status check_expert_number(int32_t n_experts) {
  if (n_experts >= 1 && static_cast<uint32_t>(n_experts) <= kMostExperts) return {};
  return error(moecclInvalidArgument, "n_experts is {}: give 1 to {}", n_experts, kMostExperts);
}

Result<algo::ReplicaPlacement> read_placement(const moecclPlacement_t* placement, uint32_t n_ranks) {
  MOECCL_ASSIGN_OR_RETURN(const moecclPlacement_t given, adopt(placement, "placement"));
  MOECCL_TRY(check_expert_number(given.n_experts));
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
  std::shared_ptr<Kept> made;
  if (kept == nullptr || !kept->serves(side, call)) {
    MOECCL_ASSIGN_OR_RETURN(made, checked(comm, side, call));
    kept = made;
  }
  MOECCL_TRY(check_buffers(call, kept->in_bytes, kept->out_bytes));
  if (op.on_device() && call.op == moecclOpExpertAllReduce) {  // the others move rows through staging
    MOECCL_TRY(comm.cuda()->open_to_peers(call.in, kept->in_bytes));
    if (call.out != call.in) MOECCL_TRY(comm.cuda()->open_to_peers(call.out, kept->out_bytes));
  }
  // Only calls that pass the checks decide for their class, because a call that is wrong on one rank would leave that
  // rank with another decision than the others.
  if (made != nullptr) {
    MOECCL_ASSIGN_OR_RETURN(made->slot, make_slot(comm, side, made->asked));
    place = kept;
  }
  op.signature.op = call.op;
  op.signature.type = call.type;
  op.signature.count = call.count;
  if (plan::reduces(call.op)) op.signature.reduce = static_cast<uint8_t>(call.reduce);
  op.input = call.in;
  op.output = call.out;
  op.output_bytes = kept->out_bytes;
  op.element_bytes = moecclTypeSize(call.type);
  comm.attach(op, kept->slot, 0, false);
  return {};
}

Status prepare_expert_layers(Communicator& comm, const ExpertCall& asked, std::span<const moecclExpertLayer_t> layers,
                             exec::Operation& op) {
  MOECCL_TRY(comm.usable());
  if (asked.op != moecclOpReduceGradients && asked.op != moecclOpCollectGradients && asked.op != moecclOpPlaceWeights)
    return error(moecclInvalidArgument,
                 "what is {}: give moecclOpReduceGradients, moecclOpCollectGradients or moecclOpPlaceWeights",
                 static_cast<int>(asked.op));
  if (layers.empty() || layers.size() > kMostExperts)  // a layer has an expert or more
    return error(moecclInvalidArgument, "n_layers is {}: give 1 to {}", layers.size(), kMostExperts);
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

// Returns what runs a mean of the call: ways whose sums have the same bits may have different means, so a mean has a
// choice and a trial of its own.
static std::string means_text(Communicator& comm, const Side& side, CheckedCall c) {
  if (!plan::reduces(c.op)) return "";
  c.average = true;
  const ExpertPlans plans(comm, side, c);
  const WayOrder order = plans.order(false, false);
  const Result<WaysPage> page = plans.page(order);
  if (!page.ok()) return format("moecclAvg: {}.\n", page.status().message());
  const std::string& name = page->plan.algorithm;
  return format("moecclAvg: {}, {}.\n", name,
                why_chosen(side.selector, c.op, name, plans.obeys_force(), order, "for this placement"));
}

Result<std::string> explain_expert_call(Communicator& comm, const ExpertCall& call) {
  if ((call.op < moecclOpExpertAllReduce || call.op > moecclOpPlaceWeights) && call.op != moecclOpReduceGradients)
    return error(moecclInvalidArgument,
                 "op is {}: give moecclOpExpertAllReduce, CollectGradients, ReduceGradients or PlaceWeights",
                 static_cast<int>(call.op));
  MOECCL_ASSIGN_OR_RETURN(const CheckedCall c, check_call(comm, call));
  const Side side = side_of(comm, false);
  const ExpertPlans plans(comm, side, c);
  const WayOrder order = plans.order(false, false);
  MOECCL_ASSIGN_OR_RETURN(const WaysPage page, plans.page(order));
  const std::string why =
      why_chosen(side.selector, call.op, page.plan.algorithm, plans.obeys_force(), order, "for this placement");
  return plan::explain({page.plan, comm.tree(), page.cost, comm.rank(), why, page.candidates, 0, comm.paced()}) +
         means_text(comm, side, c) +
         format("Figures: {}.\n", plan::figures_text(*side.selector.profile(), comm.tree()));
}

}  // namespace moeccl::comm
