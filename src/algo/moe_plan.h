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

// Each edge of a rank has one block of staging, in dispatch that of an in edge and in combine that of an out edge. A
// block of a later hop carries the rows of many origins, so it may take several slots in a row.
struct MoePlanShape {
  struct Hop {
    uint32_t first = 0, width = 1;  // the edge at place k has the slots [first + k * width, first + (k + 1) * width)
    friend bool operator==(const Hop&, const Hop&) = default;
  };
  std::vector<Hop> hops;
  uint32_t n_slots = 1;  // the same on all ranks and for both operations
  uint32_t depth = 2;    // rotations of staging
  bool expert_major = false;
  // A lane waits for all peers of a hop before their rows, and signals to all of them after. The blocks of a kernel
  // then meet once a chunk and hop, instead of once for each peer.
  bool batched = false;
};
// `slot_rows`: what moe_slot_rows() returned. Blocks have room for one token of each origin.
MoePlanShape moe_plan_shape(const Paths& paths, bool expert_major, uint64_t slot_rows);

plan::Program build_dispatch(const Paths& paths, const RankRows& rank, const MoePlanShape& shape);
plan::Program build_combine(const Paths& paths, const RankRows& rank, const MoePlanShape& shape);
// Equal on ranks that would build the same plan, whatever their chunks and slots.
uint64_t moe_plan_hash(moecclOp_t op, const Paths& paths, const plan::LevelTree& tree, const Placement& placement,
                       const MoePlanShape& shape);

// Returns the rows of one slot if all slots together may take staging_bytes; at most what any block can hold. 0: not
// even one token of each origin fits. The same on all ranks.
uint64_t moe_slot_rows(const MoeShape& shape, const Paths& paths, uint64_t staging_bytes);
// Returns the least staging with which moe_slot_rows() is not 0.
uint64_t moe_least_staging(const MoeShape& shape, const Paths& paths);
// Returns the staging with which a uniform routing of max_tokens takes at most about `n_chunks` chunks.
uint64_t moe_staging_for(const MoeShape& shape, const Paths& paths, uint64_t n_chunks);
uint64_t moe_staging_bytes(const MoeShape& shape, const MoePlanShape& plan, uint64_t slot_rows);
// Returns everything that a Binding needs besides the lists. count and element are rows.
plan::Binding moe_binding(const MoeShape& shape, uint32_t n_chunks, uint64_t slot_rows);

}  // namespace moeccl::algo
