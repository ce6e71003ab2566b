// SPDX-License-Identifier: Apache-2.0
// Shared by plans that move rows by lists: where a rank's experts lie in its buffers, the places of its staging, and a
// program with its lists.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/algo/builder.h"
#include "src/algo/replica_placement.h"
#include "src/plan/binding.h"

namespace moeccl::algo {

// Where a rank's slots and shards begin in its buffers, in elements. Empty: they follow one another without gaps.
struct ExpertPlaces {
  std::span<const uint64_t> slots;   // [slots of the rank]
  std::span<const uint64_t> shards;  // [n_experts]

  uint64_t slot(uint32_t s, uint64_t count) const { return slots.empty() ? s * count : slots[s]; }
  uint64_t shard(uint32_t expert, uint64_t elements) const {
    return shards.empty() ? expert * elements : shards[expert];
  }
};

// A row is an element. Each piece, up to a common size, has a place in a rank's staging; several places share a slot if
// there are more than plans can number.
struct StagedPlaces {
  Layout layout;
  Chunking chunking;            // of a piece
  uint32_t per_slot = 1;        // places
  uint64_t place_elements = 0;  // whole lines

  // shape: of one piece, with all of the staging. Fails if n_places do not fit it.
  static Result<StagedPlaces> make(const Shape& shape, uint64_t n_places, uint64_t chunk_bytes);
  uint64_t slot_elements() const { return place_elements * per_slot; }
  Ref ref(uint32_t rank, uint32_t place) const { return slot(rank, place / per_slot); }
  uint64_t first_row(uint32_t place) const { return place % per_slot * place_elements; }
  uint64_t hash(uint64_t of_plan) const;
};

// Adds a list whose chunk c is block(first element of the chunk) of a piece of `length`; returns its number.
template <class Block>
uint32_t add_rows(std::vector<plan::RowBlock>& rows, const Chunking& chunking, uint64_t length, Block&& block) {
  for (uint32_t c = 0; c < chunking.n_chunks; ++c) {
    const plan::Range range = plan::chunk_range(chunking, length, c);
    rows.push_back(block(range.offset));
    rows.back().count = range.length;
  }
  return static_cast<uint32_t>(rows.size() / chunking.n_chunks - 1);
}

// Returns the hosts of an expert, node after node. node_of: [n_ranks], or null if all ranks are one node.
std::vector<const ExpertHost*> hosts_by_node(const ReplicaPlacement& placement, uint32_t expert,
                                             const std::vector<uint32_t>* node_of);

// Returns InvalidArgument, which names the expert, if one has no slot.
Status every_expert_has_a_slot(const ReplicaPlacement& placement);

// A rank's program with the lists that its steps name. The lists keep their addresses when a BoundRows is moved.
struct BoundRows {
  plan::Program program;
  std::vector<plan::RowBlock> rows;
  std::vector<plan::SumBlock> sums;
  std::vector<uint64_t> stretches;  // to which `sums` point
  plan::Binding binding;            // points to `rows` and `sums`
};

// How large a call's experts are: the lists of rows depend on it.
struct RowSize {
  uint64_t count = 0;  // elements of an expert
  uint32_t element_bytes = 0;
  uint64_t staging_bytes = 0;
};

// All ranks' programs, with the lists that they read. Not copied, as the bindings point to the lists.
struct WholeRows {
  plan::Plan plan;
  std::vector<BoundRows> bound;         // [n_ranks]
  std::vector<plan::Binding> bindings;  // [n_ranks]

  WholeRows() = default;
  WholeRows(const WholeRows&) = delete;
  WholeRows(WholeRows&&) = default;
  WholeRows& operator=(const WholeRows&) = delete;
  WholeRows& operator=(WholeRows&&) = default;
};

// `rows` must have name(), shape(), chunking(), hash() and build(rank).
template <class Rows>
WholeRows whole_rows(const Rows& rows) {
  WholeRows whole;
  whole.plan.algorithm = rows.name();
  whole.plan.shape = rows.shape();
  whole.plan.chunking = rows.chunking();
  whole.plan.hash = rows.hash();
  for (uint32_t r = 0; r < whole.plan.shape.n_ranks; ++r) {
    whole.bound.push_back(rows.build(r));
    whole.plan.programs.push_back(whole.bound.back().program);
    whole.bindings.push_back(whole.bound.back().binding);
  }
  return whole;
}

}  // namespace moeccl::algo
