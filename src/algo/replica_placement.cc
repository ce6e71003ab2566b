// SPDX-License-Identifier: Apache-2.0
#include "src/algo/replica_placement.h"

#include <algorithm>

#include "src/base/hash.h"

namespace moeccl::algo {

Result<ReplicaPlacement> ReplicaPlacement::make(uint32_t n_experts, std::span<const uint32_t> slots_of_rank,
                                                std::span<const int32_t> slot_expert) {
  ReplicaPlacement p;
  p.n_ranks = static_cast<uint32_t>(slots_of_rank.size());
  p.n_experts = n_experts;
  p.slot_expert.assign(slot_expert.begin(), slot_expert.end());
  p.hosts.resize(n_experts);
  p.first_slot.push_back(0);
  for (uint32_t r = 0; r < p.n_ranks; ++r) {
    uint32_t distinct = 0;
    for (uint32_t s = 0; s < slots_of_rank[r]; ++s) {
      const int32_t expert = slot_expert[p.first_slot[r] + s];
      if (expert < -1 || expert >= static_cast<int64_t>(n_experts))
        return error(moecclInvalidArgument,
                     "slot_expert[{}] (slot {} of rank {}) is {}: give an expert from 0 to {}, or -1 for an empty slot",
                     p.first_slot[r] + s, s, r, expert, int64_t{n_experts} - 1);
      if (expert < 0) continue;
      std::vector<ExpertHost>& hosts = p.hosts[static_cast<size_t>(expert)];
      if (hosts.empty() || hosts.back().rank != r) hosts.push_back({r, distinct++, {}});
      hosts.back().slots.push_back(s);
    }
    p.first_slot.push_back(p.first_slot[r] + slots_of_rank[r]);
    p.most_experts = std::max(p.most_experts, distinct);
  }
  return p;
}

uint32_t ReplicaPlacement::most_slots() const {
  uint32_t most = 0;
  for (uint32_t r = 0; r < n_ranks; ++r) most = std::max(most, n_slots(r));
  return most;
}

uint32_t ReplicaPlacement::n_replicas(uint32_t expert) const {
  size_t n = 0;
  for (const ExpertHost& host : hosts[expert]) n += host.slots.size();
  return static_cast<uint32_t>(n);
}

const ExpertHost* ReplicaPlacement::host(uint32_t expert, uint32_t rank) const {
  const std::vector<ExpertHost>& all = hosts[expert];
  const auto at = std::lower_bound(all.begin(), all.end(), rank,
                                   [](const ExpertHost& host, uint32_t wanted) { return host.rank < wanted; });
  return at != all.end() && at->rank == rank ? &*at : nullptr;
}

uint64_t ReplicaPlacement::hash() const {
  uint64_t h = hash_combine(n_ranks, n_experts);
  for (const uint32_t first : first_slot) h = hash_combine(h, first);
  for (const int32_t expert : slot_expert) h = hash_combine(h, static_cast<uint64_t>(int64_t{expert}));
  return h;
}

uint64_t shard_elements(uint64_t count, uint32_t n_ranks) { return count / n_ranks + (count % n_ranks != 0 ? 1 : 0); }

Shard shard_of(uint64_t count, uint32_t n_ranks, uint32_t rank) {
  const uint64_t shard = shard_elements(count, n_ranks), begin = std::min(count, shard * rank);
  return {begin, std::min(count - begin, shard)};
}

uint32_t gradient_source(const ReplicaPlacement& placement, uint32_t expert, uint32_t rank) {
  const std::vector<ExpertHost>& hosts = placement.hosts[expert];
  if (placement.host(expert, rank) != nullptr) return rank;
  return hosts[rank % hosts.size()].rank;
}

}  // namespace moeccl::algo
