// SPDX-License-Identifier: Apache-2.0
#include "src/comm/prove_if_asked.h"

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

}  // namespace moeccl::comm
