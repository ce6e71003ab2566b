// SPDX-License-Identifier: Apache-2.0
// The facts about operations that readers of plans may ask for: one row per operation, in the order of moecclOp_t.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "moeccl/plan.h"

namespace moeccl::plan {

// Blocks of a user's buffer, each of `count` elements: one in all, one per rank, or one per tensor group.
enum class Blocks : uint8_t { kOne, kRanks, kGroups };
enum class Root : uint8_t { kNone, kGives, kTakes };
// What a plan is made from: the shape of a call (src/algo/registry.cc), a layer's routing, or the placement of experts.
enum class PlanOf : uint8_t { kCall, kRouting, kPlacement, kNothing };

struct OpFacts {
  const char* name;   // as MOECCL_PLAN and messages spell it
  const char* title;  // as pages and profiles spell it
  PlanOf plan = PlanOf::kCall;
  Blocks in = Blocks::kOne, out = Blocks::kOne;
  Root root = Root::kNone;
  bool reduces = false;        // elements are summed over ranks
  bool meets_all = false;      // every rank needs data of every other rank, and so learns of any difference
  bool eager = false;          // exec/eager.h can run it
  bool private_sizes = false;  // each rank knows only its own sizes
  bool rows = false;           // moves rows by the lists of its Binding
  moecclPriority_t traffic = moecclPriorityDP;  // its class if the user chose none
  const char* algorithms = "";                  // if the plan does not come from a call: the choices of moecclPlanForce
};

inline constexpr std::array<OpFacts, MOECCL_NUM_OPS + 1> kOps = {{
    {.name = "allreduce", .title = "AllReduce", .reduces = true, .meets_all = true, .eager = true},
    {.name = "reduce", .title = "Reduce", .root = Root::kTakes, .reduces = true, .eager = true},
    {.name = "broadcast", .title = "Broadcast", .root = Root::kGives, .eager = true},
    {.name = "allgather",
     .title = "AllGather",
     .out = Blocks::kRanks,
     .meets_all = true,
     .eager = true,
     .traffic = moecclPriorityCP},
    {.name = "reduce_scatter",
     .title = "ReduceScatter",
     .in = Blocks::kRanks,
     .reduces = true,
     .meets_all = true,
     .eager = true},
    {.name = "alltoall",
     .title = "AllToAll",
     .in = Blocks::kRanks,
     .out = Blocks::kRanks,
     .meets_all = true,
     .eager = true,
     .traffic = moecclPriorityEP},
    {.name = "alltoallv",
     .title = "AllToAllv",
     .in = Blocks::kRanks,
     .out = Blocks::kRanks,
     .meets_all = true,
     .eager = true,
     .private_sizes = true,
     .traffic = moecclPriorityEP},
    {.name = "gather", .title = "Gather", .out = Blocks::kRanks, .root = Root::kTakes, .eager = true},
    {.name = "scatter", .title = "Scatter", .in = Blocks::kRanks, .root = Root::kGives, .eager = true},
    {.name = "sendrecv", .title = "SendRecv", .plan = PlanOf::kNothing, .traffic = moecclPriorityPP},
    {.name = "dispatch",
     .title = "Dispatch",
     .plan = PlanOf::kRouting,
     .rows = true,
     .traffic = moecclPriorityEP,
     .algorithms = "flat,2dh,hier:1,hier:2,hier:3,hier:4,hier:5,hier:6,hier:7,hier:8"},
    {.name = "combine", .title = "Combine", .plan = PlanOf::kRouting, .rows = true, .traffic = moecclPriorityEP},
    {.name = "expert_allreduce",
     .title = "ExpertAllReduce",
     .plan = PlanOf::kPlacement,
     .reduces = true,
     .algorithms = "direct,flat,nodes"},
    {.name = "collect_gradients",
     .title = "CollectGradients",
     .plan = PlanOf::kPlacement,
     .rows = true,
     .algorithms = "direct"},
    {.name = "place_weights",
     .title = "PlaceWeights",
     .plan = PlanOf::kPlacement,
     .rows = true,
     .algorithms = "direct,nodes"},
    {.name = "expert_gather",
     .title = "ExpertGather",
     .plan = PlanOf::kPlacement,
     .traffic = moecclPriorityEP,
     .algorithms = "direct,staged"},
    {.name = "tensor_alltoall",
     .title = "TensorAllToAll",
     .in = Blocks::kGroups,
     .out = Blocks::kGroups,
     .traffic = moecclPriorityEP},
    {.name = "expert_reduce",
     .title = "ExpertReduce",
     .plan = PlanOf::kPlacement,
     .reduces = true,
     .algorithms = "direct,staged"},
    {.name = "reduce_gradients",
     .title = "ReduceGradients",
     .plan = PlanOf::kPlacement,
     .reduces = true,
     .rows = true,
     .algorithms = "direct,nodes"},
    {.name = "tensor_alltoallv",
     .title = "TensorAllToAllv",
     .plan = PlanOf::kPlacement,
     .rows = true,
     .traffic = moecclPriorityEP,
     .algorithms = "lean"},
    // A number beyond the last operation, which a peer may have announced.
    {.name = "unknown operation", .title = "unknown operation", .plan = PlanOf::kNothing},
}};

constexpr const OpFacts& facts(moecclOp_t op) {
  const auto i = static_cast<size_t>(op);
  return kOps[i < MOECCL_NUM_OPS ? i : MOECCL_NUM_OPS];
}

constexpr const char* op_name(moecclOp_t op) { return facts(op).name; }
constexpr const char* op_title(moecclOp_t op) { return facts(op).title; }
constexpr bool reduces(moecclOp_t op) { return facts(op).reduces; }
constexpr bool rooted(moecclOp_t op) { return facts(op).root != Root::kNone; }
// Return whether only the root's input (root_gives) or only the root's output (root_takes) is used.
constexpr bool root_gives(moecclOp_t op) { return facts(op).root == Root::kGives; }
constexpr bool root_takes(moecclOp_t op) { return facts(op).root == Root::kTakes; }

// Returns the operation with this name, or MOECCL_NUM_OPS.
constexpr moecclOp_t parse_op(std::string_view name) {
  size_t i = 0;
  while (i < MOECCL_NUM_OPS && name != kOps[i].name) ++i;
  return static_cast<moecclOp_t>(i);
}

constexpr uint32_t n_blocks(Blocks blocks, uint32_t n_ranks, uint32_t n_groups) {
  return blocks == Blocks::kRanks ? n_ranks : blocks == Blocks::kGroups ? n_groups : 1;
}
constexpr uint32_t in_blocks(moecclOp_t op, uint32_t n_ranks, uint32_t n_groups = 1) {
  return n_blocks(facts(op).in, n_ranks, n_groups);
}
constexpr uint32_t out_blocks(moecclOp_t op, uint32_t n_ranks, uint32_t n_groups = 1) {
  return n_blocks(facts(op).out, n_ranks, n_groups);
}

}  // namespace moeccl::plan
