// SPDX-License-Identifier: Apache-2.0
#include "src/algo/experts/expert_rows.h"

#include <algorithm>

#include "src/algo/tuning.h"
#include "src/base/hash.h"

namespace moeccl::algo {

Result<StagedPlaces> StagedPlaces::make(const Shape& shape, uint64_t n_places, uint64_t chunk_bytes) {
  constexpr uint64_t kMostSlots = 1 << 15;  // slots are 16-bit numbers in plans
  StagedPlaces p;
  p.per_slot = static_cast<uint32_t>(std::max<uint64_t>(1, (n_places + kMostSlots - 1) / kMostSlots));
  p.layout = {static_cast<uint32_t>((n_places + p.per_slot - 1) / p.per_slot), tuning::kOverlap};
  Shape one = shape;  // a place of a slot
  one.staging_bytes /= p.per_slot;
  MOECCL_TRY(chunks_fit(one, p.layout));
  p.chunking = cut(one, p.layout, chunk_bytes);
  p.place_elements = plan::whole_lines(p.chunking.chunk, shape.element_bytes);
  return p;
}

uint64_t StagedPlaces::hash(uint64_t of_plan) const {
  const uint64_t h = hash_combine(of_plan, chunking.chunk);
  return hash_combine(hash_combine(h, layout.n_slots * uint64_t{16} + layout.depth), per_slot);
}

std::vector<const ExpertHost*> hosts_by_node(const ReplicaPlacement& placement, uint32_t expert,
                                             const std::vector<uint32_t>* node_of) {
  std::vector<const ExpertHost*> hosts;
  hosts.reserve(placement.hosts[expert].size());
  for (const ExpertHost& host : placement.hosts[expert]) hosts.push_back(&host);
  if (node_of == nullptr) return hosts;
  const auto less = [&](const ExpertHost* a, const ExpertHost* b) { return (*node_of)[a->rank] < (*node_of)[b->rank]; };
  if (!std::is_sorted(hosts.begin(), hosts.end(), less)) std::stable_sort(hosts.begin(), hosts.end(), less);
  return hosts;
}

Status every_expert_has_a_slot(const ReplicaPlacement& placement) {
  for (uint32_t e = 0; e < placement.n_experts; ++e)
    if (placement.hosts[e].empty())
      return error(moecclInvalidArgument,
                   "slot_expert has no slot for expert {}: its gradient is nowhere; give every expert a slot", e);
  return {};
}

}  // namespace moeccl::algo
