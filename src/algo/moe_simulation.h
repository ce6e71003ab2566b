// Dispatch and combine of thousands of ranks on a clock. The lanes, their order, chunks and credits are those of
// moe_plan.h, without row lists: an edge carries its share of its rows in every chunk. Uplinks serve one transfer at a
// time in each direction, as in plan/cost_run.h; every rank has a core (or GPU) of its own.
#pragma once

#include "src/plan/cost.h"
#include "src/routing/moe_traffic.h"

namespace moeccl::algo {

struct SimulatedRun {
  double total_ns = 0;
  plan::CriticalPath path;
  std::vector<double> busiest_ns;     // [depth] how long the level's busiest uplink was in use
  std::vector<uint64_t> level_bytes;  // [depth]
  uint32_t n_chunks = 1;
  uint64_t n_steps = 0;
  uint64_t staging_bytes = 0;  // of the rank that needs most
};

struct SimulatedRows {
  uint64_t row_bytes = 1;
  uint32_t n_chunks = 0;  // 0: as many as a routing takes (moe_routing.cc)
};

// op: moecclOpDispatch or moecclOpCombine.
SimulatedRun simulate_moe(moecclOp_t op, const Traffic& traffic, const plan::LevelTree& tree,
                          const plan::Profile& profile, const SimulatedRows& rows);

}  // namespace moeccl::algo
