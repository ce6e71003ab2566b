// SPDX-License-Identifier: Apache-2.0
// Entry points of plan.h.
#include "moeccl/plan.h"

#include <cstring>

#include "src/api/convert.h"
#include "src/base/adopt.h"
#include "src/comm/collective.h"
#include "src/exec/operation.h"
#include "src/plan/cost.h"
#include "src/plan/printer.h"

using namespace moeccl;
using api::with_comm;
using comm::Communicator;

namespace {

struct Look {
  std::shared_ptr<comm::PlanSlot> cached;
  bool tried = false;
  comm::Trials::Report trial;
  plan::Plan plan;  // the programs of all ranks for the plan that is expected to run
  plan::Cost cost;
};

Status check_number(moecclOp_t op) {
  const auto i = static_cast<int>(op);
  return i >= 0 && i < MOECCL_NUM_OPS ? Status() : error(moecclInvalidArgument, "op is {}: give a moecclOp_t", i);
}

// Says what determines an operation's plan, if not a call's shape, and which call knows the plan.
const char* determined_by(moecclOp_t op) {
  switch (op) {
    case moecclOpDispatch:
    case moecclOpCombine:
      return "its plan depends on the routing, ask moecclMoeExplain or moecclRoutingGetInfo";
    case moecclOpExpertAllReduce:
    case moecclOpCollectGradients:
    case moecclOpPlaceWeights:
    case moecclOpReduceGradients:
      return "its plan depends on the placement of replicas, ask moecclExpertExplain";
    case moecclOpExpertGather:
    case moecclOpExpertReduce:
      return "its plan depends on the expert domains, ask moecclHybridExplain";
    case moecclOpTensorAllToAllv:
      return "its plan depends on the counts of a call, and there is only one: ask about tensor_alltoall for blocks of "
             "one size";
    case moecclOpSendRecv:
      return "messages need no plan";
    default:
      return nullptr;
  }
}

Status check_op(moecclOp_t op) {
  MOECCL_TRY(check_number(op));
  const char* const why = determined_by(op);
  return why == nullptr ? Status() : error(moecclInvalidArgument, "op is {}: {}", plan::op_name(op), why);
}

Result<Look> look(Communicator& c, moecclOp_t op, size_t count, moecclDataType_t type) {
  MOECCL_TRY(check_op(op));
  const size_t bytes = moecclTypeSize(type);
  if (bytes == 0) return error(moecclInvalidArgument, "type is {}: give a moecclDataType_t", static_cast<int>(type));
  MOECCL_TRY(comm::check_count(c.tree(), op, count, bytes));
  const uint64_t planned = plan::facts(op).private_sizes ? 0 : count;  // AllToAllv's counts are private to each rank
  const comm::PlanKey key{op, 0, planned, static_cast<uint32_t>(bytes), false};
  Look l;
  MOECCL_ASSIGN_OR_RETURN(l.cached, c.selector().runs_now(key, &l.trial));
  l.tried = l.trial.decided || !l.cached->tried.empty();
  const algo::Algorithm* a = algo::find(op, l.cached->choice.algorithm);
  l.plan = algo::build_all(*a, c.selector().shape_of(key, false), c.tree());
  l.cost = plan::price(l.plan, c.tree(), *c.selector().profile());
  if (const double ns = c.selector().measured_ns(*a, l.plan.shape); ns > 0) l.cost.total_ns = ns;
  return l;
}

// Says why this plan was chosen: forced, the fastest of those that were tried, or the cheapest.
std::string reason(const Communicator& c, const Look& l, moecclOp_t op, uint32_t apply) {
  if (c.selector().forced(op) == l.plan.algorithm) return "forced by moecclPlanForce or MOECCL_PLAN";
  if (const Status obeys = c.selector().obeys_force(l.plan.shape); !obeys.ok())
    return format("cheapest of {} that apply; {} is forced but does not apply: {}", apply, c.selector().forced(op),
                  obeys.message());
  if (!l.trial.decided) return format("cheapest of {} that apply", apply);
  return l.trial.text();
}

Status query(Communicator& c, moecclOp_t op, size_t count, moecclDataType_t type, moecclPlanInfo_t* out) {
  MOECCL_TRY(check_out(out, "info"));
  MOECCL_ASSIGN_OR_RETURN(const Look l, look(c, op, count, type));
  moecclPlanInfo_t info{};
  std::strncpy(info.algorithm, l.cached->choice.algorithm, sizeof(info.algorithm) - 1);
  info.hash = l.cached->choice.plan_hash;
  info.predicted_us = l.cost.total_ns / 1e3;
  info.measured_us = l.cached->measured.ns.load(std::memory_order_relaxed) / 1e3;
  info.wire_bytes = l.cost.sent_bytes[c.rank()];
  info.n_steps = l.cached->choice.program->n_steps();
  info.n_chunks = l.cached->choice.chunking.n_chunks;
  info.emulated = c.paced() ? 1 : 0;
  info.trial = l.trial.decided ? 2 : l.tried ? 1 : 0;
  std::strncpy(info.forced, c.selector().forced(op).c_str(), sizeof(info.forced) - 1);
  std::strncpy(info.note, c.selector().obeys_force(l.plan.shape).message().c_str(), sizeof(info.note) - 1);
  give(info, out);
  return {};
}

Status prove(Communicator& c, moecclOp_t op, size_t count, moecclDataType_t type) {
  MOECCL_ASSIGN_OR_RETURN(const Look l, look(c, op, count, type));
  const comm::PlanKey key{op, 0, l.plan.shape.count, l.plan.shape.element_bytes, false};
  const comm::PlanSlot& cached = *l.cached;
  const auto proved = [&](const char* algorithm, bool reachable) {
    return algo::prove(*algo::find(op, algorithm), c.selector().shape_of(key, reachable), c.tree());
  };
  MOECCL_TRY(proved(cached.choice.algorithm, false));
  if (cached.asks_reach) MOECCL_TRY(proved(cached.choice_if_reachable.algorithm, true));
  return cached.has_rest ? proved(cached.choice_for_rest.algorithm, false) : Status();
}

Result<std::string> page(Communicator& c, moecclOp_t op, size_t count, moecclDataType_t type) {
  MOECCL_ASSIGN_OR_RETURN(const Look l, look(c, op, count, type));
  std::vector<plan::PlanCandidate> candidates;
  uint32_t apply = 0;
  for (const comm::Candidate& k : c.selector().candidates(l.plan.shape)) {
    apply += k.applies.ok() ? 1 : 0;
    candidates.push_back({k.algorithm->name, k.predicted_ns, k.applies.message()});
  }
  std::string text = plan::explain({l.plan, c.tree(), l.cost, c.rank(), reason(c, l, op, apply), candidates,
                                    l.cached->measured.ns.load(std::memory_order_relaxed), c.paced(),
                                    comm::Selector::kTypicalBlockBytes});
  text += format("Figures: {}.\n", plan::figures_text(*c.selector().profile(), c.tree()));
  if (c.cuda() != nullptr && !c.cuda()->path().empty()) text += format("CUDA memory: {}.\n", c.cuda()->path());
  if (const auto lanes = l.cached->measured.lanes.get(); !lanes.empty()) text += exec::lanes_text(lanes);
  if (l.cached->asks_reach) {
    text += format("With all buffers from moecclMemAlloc: {} instead.\n", l.cached->choice_if_reachable.algorithm);
  }
  if (l.cached->has_rest) {
    text += format("What is left of blocks of more than {} elements: {} instead.\n", l.cached->choice.chunking.chunk,
                   l.cached->choice_for_rest.algorithm);
  }
  return text;
}

}  // namespace

moecclResult_t moecclPlanProve(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type) {
  return with_comm<api::kLocal>(comm, [&](Communicator& c) { return prove(c, op, count, type); });
}

const char* moecclOpName(moecclOp_t op) { return plan::op_name(op); }

moecclResult_t moecclPlanList(moecclOp_t op, char* text, size_t text_bytes, size_t* needed) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(check_number(op));
    api::copy_text(algo::names_of(op, ","), text, text_bytes, needed);
    return {};
  });
}

moecclResult_t moecclPlanQuery(moecclComm_t handle, moecclOp_t op, size_t count, moecclDataType_t type,
                               moecclPlanInfo_t* info) {
  return with_comm<api::kLocal>(handle, [&](Communicator& c) { return query(c, op, count, type, info); });
}

moecclResult_t moecclPlanExplain(moecclComm_t handle, moecclOp_t op, size_t count, moecclDataType_t type, char* text,
                                 size_t text_bytes, size_t* needed) {
  return with_comm<api::kLocal>(handle, [&](Communicator& c) -> Status {
    return api::give_text(page(c, op, count, type), text, text_bytes, needed);
  });
}

moecclResult_t moecclPlanForce(moecclComm_t handle, moecclOp_t op, const char* algorithm) {
  return with_comm<api::kLocal>(handle, [&](Communicator& c) -> Status {
    MOECCL_TRY(check_number(op));
    return c.force(op, algorithm == nullptr ? "" : algorithm);
  });
}
