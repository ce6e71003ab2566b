// Exchanges with one synchronisation per chunk: every rank stages its data once and all pull what they need. With
// one chunk this is `oneshot`; with two rotations a chunk's signal also says that the chunk before it was read:
// `staged`.
#pragma once

#include "src/algo/builder.h"

namespace moeccl::algo {

Program pull_all_gather(const Shape& shape, uint32_t rank, Layout layout);
Program pull_reduce_scatter(const Shape& shape, uint32_t rank, Layout layout);
Program pull_all_to_all(const Shape& shape, uint32_t rank, Layout layout);

// One way: the root's data to all, or all data to the root. `credits`: readers tell when they have read a chunk.
Program pull_broadcast(const Shape& shape, uint32_t rank, Layout layout, bool credits);
Program pull_gather(const Shape& shape, uint32_t rank, Layout layout, bool credits);
Program pull_scatter(const Shape& shape, uint32_t rank, Layout layout, bool credits);

// The extent `own` of all ranks in rank order: own data for this rank, slot `index` for the others.
std::vector<Ref> peers_slots(const Shape& shape, uint32_t rank, uint32_t index, Ref own);

}  // namespace moeccl::algo
