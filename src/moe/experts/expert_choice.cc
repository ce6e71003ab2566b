// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_choice.h"

#include "src/algo/experts/prove_experts.h"
#include "src/base/env.h"
#include "src/base/log.h"
#include "src/plan/op.h"

namespace moeccl::comm {

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
