// SPDX-License-Identifier: Apache-2.0
// Plans of dispatch and combine for every MoE algorithm. They depend only on the paths, not on a routing: RoutingTables
// binds the lists that their row steps name (RowLists) for each routing.
//
// Dispatch: the lane of hop 0 sends own rows; the lane of later hops sends own rows and forwards what arrived; the copy
// lane spreads arrivals into Output and gives slots back. While chunk c fans out inside a node, chunk c + 1 crosses
// between nodes. Combine is the mirror image: the last hop returns first, and each holder sums what came back with its
// own experts' rows.
#pragma once

#include "src/routing/hop_time.h"
#include "src/routing/routing_tables.h"

namespace moeccl::algo {

struct MoePlanShape {
  uint32_t n_slots = 1;  // the same on all ranks and for both operations
  uint32_t depth = 2;    // rotations of staging
  bool expert_major = false;
  // A lane waits for all peers of a hop before their rows, and signals to all of them after. The blocks of a kernel
  // then meet once a chunk and hop, instead of once for each peer.
  bool batched = false;
};
MoePlanShape moe_plan_shape(const Paths& paths, bool expert_major);

plan::Program build_dispatch(const Paths& paths, const RankRows& rank, const MoePlanShape& shape);
plan::Program build_combine(const Paths& paths, const RankRows& rank, const MoePlanShape& shape);
// Equal on ranks that would build the same plan, whatever their chunks and slots.
uint64_t moe_plan_hash(moecclOp_t op, const Paths& paths, const plan::LevelTree& tree, const Placement& placement,
                       const MoePlanShape& shape);

// Returns the rows of one slot if all slots together may take staging_bytes; at most what any block can hold. 0: not
// even one row fits. The same on all ranks.
uint64_t moe_slot_rows(const MoeShape& shape, const Paths& paths, const MoePlanShape& plan, uint64_t staging_bytes);
// Returns the least staging with which moe_slot_rows() gives least_rows or more.
uint64_t moe_least_staging(const MoeShape& shape, const MoePlanShape& plan, uint64_t least_rows);
uint64_t moe_staging_bytes(const MoeShape& shape, const MoePlanShape& plan, uint64_t slot_rows);
// Returns everything that a Binding needs besides the lists. count and element are rows.
plan::Binding moe_binding(const MoeShape& shape, uint32_t n_chunks, uint64_t slot_rows);

}  // namespace moeccl::algo
