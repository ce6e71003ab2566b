// SPDX-License-Identifier: Apache-2.0
// The number of replicas of each expert, and its cost (adaptive expert replication, Sections 3 and 4).
#pragma once

#include <cstdint>

#include "moeccl/solve.h"
#include "src/base/status.h"

namespace moeccl::solve {

Status check_popularity(const double* popularity, int32_t n_experts, int32_t n_slots);
// Takes checked arguments. Algorithm 1.
void replica_counts(const double* popularity, int32_t n_experts, int32_t n_slots, int32_t* counts);
// Gives one replica after another to the expert that drops the most tokens without it.
void fewest_drops(const double* popularity, int32_t n_experts, int32_t n_slots, double capacity_factor,
                  int32_t* counts);
double dropped(const double* popularity, const int32_t* counts, int32_t n_experts, int32_t n_slots,
               double capacity_factor);

// Checks that every slot names an expert and every expert has a slot.
Status check_slots(const int32_t* slot_expert, int32_t n_slots, int32_t n_experts);
// Returns an error unless each count is at least 1 and their sum is n_slots.
Status check_counts(const int32_t* counts, int32_t n_experts, int32_t n_slots);
// Algorithm 2. `sends` may be null.
void grad_sources(const int32_t* slot_expert, int32_t n_experts, int32_t n_ranks, int32_t slots_per_rank,
                  int32_t* source, int64_t* sends);
// Appendix A.2.
Status replica_comm_time(const moecclReplicaCost_t& cost, double* static_s, double* adaptive_s);

}  // namespace moeccl::solve
