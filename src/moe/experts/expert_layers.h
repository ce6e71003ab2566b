// SPDX-License-Identifier: Apache-2.0
// Several layers' experts as those of one placement: what moecclExpertLayers runs as one operation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moeccl/experts.h"
#include "src/comm/communicator.h"

namespace moeccl::comm {

struct ExpertLayers {
  // Of all layers: experts layer after layer; a rank's slots layer after layer. Points into the vectors below.
  moecclPlacement_t placement() const;
  int32_t n_experts = 0;
  std::vector<int32_t> slot_counts, slot_expert;

  // The lowest address of each kind, and where this rank's slots and all shards begin from there, in elements.
  std::byte *slots = nullptr, *shards = nullptr;
  std::vector<uint64_t> slot_first, shard_first;
};

// Fails with a sentence that names the layer. op: moecclOpReduceGradients, CollectGradients or PlaceWeights.
Result<ExpertLayers> join_layers(Communicator& comm, moecclOp_t op, std::span<const moecclExpertLayer_t> layers,
                                 uint64_t count, uint64_t element_bytes);

}  // namespace moeccl::comm
