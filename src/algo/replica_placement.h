// SPDX-License-Identifier: Apache-2.0
// The placement of replicated experts: which expert each slot of each rank holds (adaptive replication, Section 3.4).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/base/status.h"

namespace moeccl::algo {

// One expert's replicas on one rank.
struct ExpertHost {
  uint32_t rank = 0;
  uint32_t index = 0;           // of the expert among those of the rank, in the order of their first slots
  std::vector<uint32_t> slots;  // of that rank, ascending; never empty
};

struct ReplicaPlacement {
  uint32_t n_ranks = 0, n_experts = 0;
  uint32_t most_experts = 0;                   // of one rank, each counted once
  std::vector<uint32_t> first_slot;            // [n_ranks + 1] of each rank, in slot_expert
  std::vector<int32_t> slot_expert;            // rank after rank; -1: empty
  std::vector<std::vector<ExpertHost>> hosts;  // [n_experts], ascending by rank

  // slots_of_rank: [n_ranks]; slot_expert has as many entries as their sum. Fails with a message if an expert does not
  // exist.
  static Result<ReplicaPlacement> make(uint32_t n_experts, std::span<const uint32_t> slots_of_rank,
                                       std::span<const int32_t> slot_expert);

  uint32_t n_slots(uint32_t rank) const { return first_slot[rank + 1] - first_slot[rank]; }
  uint32_t most_slots() const;
  uint32_t n_replicas(uint32_t expert) const;
  // Returns the expert's slots on the rank, or null if there are none.
  const ExpertHost* host(uint32_t expert, uint32_t rank) const;
  uint64_t hash() const;
};

// Part `rank` of `count` elements that are cut evenly among the ranks, with the last parts shorter: [begin, begin +
// length).
struct Shard {
  uint64_t begin = 0, length = 0;
};
uint64_t shard_elements(uint64_t count, uint32_t n_ranks);  // of all but the last ones
Shard shard_of(uint64_t count, uint32_t n_ranks, uint32_t rank);

// Algorithm 2: returns the rank from which `rank` fetches its shard of an expert's gradient: itself if it has a
// replica, otherwise one of the replicas' ranks in turn. The expert must have a replica.
uint32_t gradient_source(const ReplicaPlacement& placement, uint32_t expert, uint32_t rank);

}  // namespace moeccl::algo
