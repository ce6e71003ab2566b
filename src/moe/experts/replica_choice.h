// SPDX-License-Identifier: Apache-2.0
// Maps experts to the slots of their replicas: decides which replica serves each choice of a token and which choices
// are dropped (adaptive replication, Section 3.2, steps 1 and 2, and Section 3.4).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moeccl/experts.h"
#include "src/comm/communicator.h"

namespace moeccl::comm {

struct ReplicaChoice {
  const int32_t* topk_index = nullptr;  // [n_tokens][top_k], in host memory
  uint64_t n_tokens = 0;
  int32_t* slot_index = nullptr;                      // [n_tokens][top_k]
  int64_t *popularity = nullptr, *dropped = nullptr;  // [n_experts] or null
};

// This call is collective: one AllGather of a count for each expert.
Status choose_replicas(Communicator& comm, const moecclReplicaDispatch_t* given, const ReplicaChoice& choice);

}  // namespace moeccl::comm
