// SPDX-License-Identifier: Apache-2.0
// Prices dispatch and combine of thousands of ranks from counts: runs the programs of moe_plan.h for all ranks under
// the clock of plan/cost.h, each chunk with its even share of the rows that a routing sends.
#pragma once

#include "src/algo/moe_plan.h"
#include "src/plan/cost.h"
#include "src/routing/moe_traffic.h"

namespace moeccl::algo {

struct MoeCost {
  plan::Cost cost;
  uint32_t n_chunks = 1;
  uint64_t staging_bytes = 0;  // with slots that hold a chunk of the largest transfer
};
// Returns roughly how many steps the programs of all ranks have at one chunk: this decides a price's memory and time.
uint64_t moe_steps(const Traffic& traffic);
// op: moecclOpDispatch or moecclOpCombine. n_chunks 0: as many as a routing of this size is cut into.
MoeCost moe_price(moecclOp_t op, const Paths& paths, const Traffic& traffic, const plan::LevelTree& tree,
                  const plan::Profile& profile, uint64_t row_bytes, uint32_t n_chunks = 0);

}  // namespace moeccl::algo
