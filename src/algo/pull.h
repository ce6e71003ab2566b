// SPDX-License-Identifier: Apache-2.0
// Exchanges with one synchronisation per chunk: every rank stages its data once and all ranks pull what they need. With
// one chunk this is `oneshot`. With two rotations, a chunk's signal also says that the chunk before it was read: this
// is `staged`.
#pragma once

#include "src/algo/builder.h"

namespace moeccl::algo {

void pull_all_gather(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank);
void pull_reduce_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank);
void pull_all_to_all(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank);

// One way: the root's data goes to all, or all data to the root. With rotations, readers tell when they have read a
// chunk.
void pull_broadcast(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank);
void pull_gather(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank);
void pull_scatter(ProgramBuilder& b, const Shape& shape, const LevelTree& tree, uint32_t rank);

// Returns the extent `own` of all ranks in rank order: own data for this rank, slot `index` for the others.
std::vector<Ref> peers_slots(const Shape& shape, uint32_t rank, uint32_t index, Ref own);

}  // namespace moeccl::algo
