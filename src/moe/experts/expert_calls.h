// SPDX-License-Identifier: Apache-2.0
// Turns a C call on replicated experts into a prepared operation: first the checks, then the plan for its placement.
#pragma once

#include <span>

#include "moeccl/experts.h"
#include "src/algo/experts/expert_rows.h"
#include "src/algo/replica_placement.h"
#include "src/comm/communicator.h"

namespace moeccl::comm {

struct ExpertCall {
  // or moecclOpCollectGradients, moecclOpReduceGradients, moecclOpPlaceWeights
  moecclOp_t op = moecclOpExpertAllReduce;
  const void* in = nullptr;
  void* out = nullptr;
  size_t count = 0;
  moecclDataType_t type = moecclInt8;
  moecclRedOp_t reduce = moecclSum;
  const moecclPlacement_t* placement = nullptr;
  algo::ExpertPlaces places = {};  // of several layers; `in` and `out` are then the bases of their buffers
};

// Fills `op`, which must outlive its run and owns the plan that was built.
Status prepare_expert_call(Communicator& comm, const ExpertCall& call, exec::Operation& op);
// Does the same for several layers, and ignores the placement and the buffers of `call`.
Status prepare_expert_layers(Communicator& comm, const ExpertCall& call, std::span<const moecclExpertLayer_t> layers,
                             exec::Operation& op);
// Returns the page of moecclExpertExplain; ignores the buffers.
Result<std::string> explain_expert_call(Communicator& comm, const ExpertCall& call);
// Refuses more elements of an expert than memory can hold for the placement's slots and experts.
Status check_expert_size(const ExpertCall& call, size_t element_bytes, const algo::ReplicaPlacement& placement);
// The most experts of a call, all of its layers together. A placement takes 24 bytes for each, wherever its slots are.
inline constexpr uint32_t kMostExperts = 1u << 22;
Status check_expert_number(int32_t n_experts);
Result<algo::ReplicaPlacement> read_placement(const moecclPlacement_t* given, uint32_t n_ranks);

}  // namespace moeccl::comm
