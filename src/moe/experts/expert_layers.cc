// SPDX-License-Identifier: Apache-2.0
#include "src/moe/experts/expert_layers.h"

#include <algorithm>

#include "src/moe/experts/expert_calls.h"

namespace moeccl::comm {
namespace {

// One buffer of a layer on this rank.
struct Piece {
  size_t layer = 0;
  bool is_slots = false, is_output = false;
  std::byte* at = nullptr;
  uint64_t bytes = 0;
  std::string name() const { return format("layers[{}].{}", layer, is_slots ? "slots" : "shards"); }
};

Status check_apart(std::vector<Piece> pieces) {
  std::erase_if(pieces, [](const Piece& p) { return p.bytes == 0; });
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.at < b.at; });
  const Piece* farthest = nullptr;  // among the pieces before
  for (const Piece& p : pieces) {
    if (farthest != nullptr && farthest->at + farthest->bytes > p.at && (farthest->is_output || p.is_output))
      return error(moecclInvalidArgument, "{} and {} overlap: give separate buffers", farthest->name(), p.name());
    if (farthest == nullptr || p.at + p.bytes > farthest->at + farthest->bytes) farthest = &p;
  }
  return {};
}

// Returns the lowest address of all slots, or of all shards. Each of them must lie a whole number of elements above it.
Result<std::byte*> base_of(std::span<const Piece> pieces, bool is_slots, uint64_t element_bytes) {
  const Piece* lowest = nullptr;
  for (const Piece& p : pieces)
    if (p.is_slots == is_slots && p.at != nullptr && (lowest == nullptr || p.at < lowest->at)) lowest = &p;
  for (const Piece& p : pieces)
    if (p.is_slots == is_slots && p.at != nullptr && static_cast<uint64_t>(p.at - lowest->at) % element_bytes != 0)
      return error(moecclInvalidArgument,
                   "{} and {} are {} bytes apart: give addresses that are a multiple of the type's {} bytes apart",
                   lowest->name(), p.name(), p.at - lowest->at, element_bytes);
  return lowest == nullptr ? nullptr : lowest->at;
}

}  // namespace

moecclPlacement_t ExpertLayers::placement() const {
  moecclPlacement_t p = MOECCL_PLACEMENT_INIT;
  p.n_experts = n_experts;
  p.slot_counts = slot_counts.data();
  p.slot_expert = slot_expert.data();
  return p;
}

Result<ExpertLayers> join_layers(Communicator& comm, const ExpertCall& call,
                                 std::span<const moecclExpertLayer_t> layers, uint64_t element_bytes) {
  const uint32_t n = comm.n_ranks();
  const uint64_t count = call.count;
  const uint64_t shard = algo::shard_elements(count, n);
  std::vector<algo::ReplicaPlacement> placements;
  std::vector<Piece> pieces;
  ExpertLayers all;
  all.slot_counts.resize(n);
  const exec::Runner* runner = nullptr;
  for (size_t l = 0; l < layers.size(); ++l) {
    Result<algo::ReplicaPlacement> read = read_placement(layers[l].placement, n);
    if (!read.ok()) return std::move(read).status().with_context(format("layers[{}]", l));
    const algo::ReplicaPlacement& p = placements.emplace_back(std::move(*read));
    if (p.n_experts > kMostExperts - static_cast<uint32_t>(all.n_experts))
      return error(moecclInvalidArgument, "{} layers have more than {} experts: give fewer layers", layers.size(),
                   kMostExperts);
    MOECCL_TRY(check_expert_size(call, element_bytes, p));
    const bool places = call.op == moecclOpPlaceWeights;
    const Piece slots{l, true, places, static_cast<std::byte*>(layers[l].slots),
                      p.n_slots(comm.rank()) * count * element_bytes};
    const Piece shards{l, false, !places, static_cast<std::byte*>(layers[l].shards),
                       p.n_experts * shard * element_bytes};
    for (const Piece& piece : {slots, shards}) {
      if (piece.at == nullptr && piece.bytes > 0)
        return error(moecclInvalidArgument, "{} is NULL: give {} bytes", piece.name(), piece.bytes);
      pieces.push_back(piece);
    }
    MOECCL_ASSIGN_OR_RETURN(exec::Runner* const runs, comm.place(slots.at, shards.at));
    if (runner != nullptr && runs != runner && (slots.at != nullptr || shards.at != nullptr))
      return error(moecclInvalidArgument,
                   "layers[{}] is of another kind of memory than the layers before: give host or CUDA memory alone", l);
    runner = runs;
    for (uint32_t r = 0; r < n; ++r) all.slot_counts[r] += static_cast<int32_t>(p.n_slots(r));
    all.n_experts += static_cast<int32_t>(p.n_experts);
  }
  MOECCL_TRY(check_apart(pieces));
  MOECCL_ASSIGN_OR_RETURN(all.slots, base_of(pieces, true, element_bytes));
  MOECCL_ASSIGN_OR_RETURN(all.shards, base_of(pieces, false, element_bytes));
  for (uint32_t r = 0; r < n; ++r) {
    int32_t first_expert = 0;
    for (const algo::ReplicaPlacement& p : placements) {
      for (uint32_t s = p.first_slot[r]; s < p.first_slot[r + 1]; ++s)
        all.slot_expert.push_back(p.slot_expert[s] < 0 ? -1 : first_expert + p.slot_expert[s]);
      first_expert += static_cast<int32_t>(p.n_experts);
    }
  }
  for (size_t l = 0; l < layers.size(); ++l) {
    const auto first = [&](const Piece& p, const std::byte* base) {
      return p.at == nullptr ? 0 : static_cast<uint64_t>(p.at - base) / element_bytes;
    };
    const uint64_t slots = first(pieces[2 * l], all.slots), shards = first(pieces[2 * l + 1], all.shards);
    for (uint32_t s = 0; s < placements[l].n_slots(comm.rank()); ++s) all.slot_first.push_back(slots + s * count);
    for (uint32_t e = 0; e < placements[l].n_experts; ++e) all.shard_first.push_back(shards + e * shard);
  }
  return all;
}

}  // namespace moeccl::comm
