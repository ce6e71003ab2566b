// SPDX-License-Identifier: Apache-2.0
// Joins the experts of several layers into one placement, so that moecclExpertLayers runs them as one operation.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moeccl/experts.h"
#include "src/comm/communicator.h"

namespace moeccl::comm {

struct ExpertLayers {
  // Returns the placement of all layers: experts and each rank's slots, layer after layer. Points to the vectors below.
  moecclPlacement_t placement() const;
  int32_t n_experts = 0;
  std::vector<int32_t> slot_counts, slot_expert;

  // The lowest address of each kind, and the offsets from there of this rank's slots and of all shards, in elements.
  std::byte *slots = nullptr, *shards = nullptr;
  std::vector<uint64_t> slot_first, shard_first;
};

struct ExpertCall;
// The error names the layer. call.op is moecclOpReduceGradients, CollectGradients or PlaceWeights.
Result<ExpertLayers> join_layers(Communicator& comm, const ExpertCall& call,
                                 std::span<const moecclExpertLayer_t> layers, uint64_t element_bytes);

}  // namespace moeccl::comm
