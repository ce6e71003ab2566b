// SPDX-License-Identifier: Apache-2.0
// The plan of dispatch or combine of all ranks, for the readers of plans. placement: the home of each expert.
#pragma once

#include "src/algo/moe_plan.h"
#include "src/routing/domains.h"

namespace moeccl::algo {

inline plan::Plan build_moe_plan(moecclOp_t op, const Paths& paths, const plan::LevelTree& tree,
                                 const Placement& placement, const MoePlanShape& shape,
                                 const Domains* domains = nullptr) {
  plan::Plan plan;
  plan.algorithm = paths.algorithm().name();
  plan.shape.op = op;
  plan.shape.n_ranks = paths.n_ranks();
  for (uint32_t r = 0; r < paths.n_ranks(); ++r) {
    const Placement seen = domains == nullptr ? placement : domains->seen_from(r, placement);
    const RankPaths rank(paths, tree, seen, r);
    plan.programs.push_back(op == moecclOpDispatch ? build_dispatch(paths, rank, shape)
                                                   : build_combine(paths, rank, shape));
  }
  return plan;
}

}  // namespace moeccl::algo
