/* SPDX-License-Identifier: Apache-2.0 */
/* Replicated experts: gradients and weights of experts that have any number of replicas on any ranks, even several on
 * one rank, under a placement that may change at every call ("Accelerating MoE Training with Adaptive Expert
 * Replication"). Conventions: types.h.
 *
 *   moecclExpertPopularity   counts tokens per expert over all ranks; the next placement is computed from these
 *   moecclChooseReplicas     does the same and picks a replica for each choice of a token, within the slots' capacity
 *   moecclExpertAllReduce    gives every replica the sum (or mean) of its expert's gradients over all replicas
 *   moecclCollectGradients   gives each rank its shard of every expert's gradient, for a uniformly sharded optimizer
 *   moecclReduceGradients    does both: gives each rank its shard of every expert's gradient, summed over all replicas
 *   moecclPlaceWeights       the way back: gives every slot of the (new) placement its expert's weights
 *   moecclExpertLayers       does one of the last three for several layers at once
 *
 * One call handles all experts and needs no setup: no communicator is made for the ranks of an expert, and a placement
 * is an argument like any other. Every rank passes the same placement, count, type and operator; a difference is
 * moecclMismatch. All expert tensors have `count` elements; slot s of a rank starts at element s * count of its buffer.
 */
#ifndef MOECCL_EXPERTS_H_
#define MOECCL_EXPERTS_H_

#include <moeccl/comm.h>
#include <moeccl/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which expert each slot holds. It is read before a call returns. */
typedef struct {
  size_t size;                /* sizeof(moecclPlacement_t) */
  int32_t n_experts;          /* 1..4194304 */
  int32_t slots_per_rank;     /* on every rank; ignored when slot_counts is given */
  const int32_t* slot_counts; /* [n_ranks] slots of each rank, or NULL */
  const int32_t* slot_expert; /* [sum of slots], rank after rank: the slot's expert, -1 for an empty slot */
} moecclPlacement_t;
#define MOECCL_PLACEMENT_INIT \
  { sizeof(moecclPlacement_t), 0, 0, NULL, NULL }

/* recv[slots][count]: for each slot, the reduction of send[slots][count] over all replicas of the slot's expert on all
 * ranks. The operator is moecclSum, or moecclAvg, which divides by the number of replicas (Section 4.1). Replicas on
 * one rank are summed before anything is sent. All replicas of an expert get bit-identical results. On a
 * deterministic communicator these are the same in every run, whatever is forced and wherever the buffers are; others
 * choose among plans that add in different orders. Partial sums of ranks are rounded to `type`. Empty slots of recv are
 * not written. In place: send == recv. An expert may have any number of replicas. A kernel on CUDA memory sums 64
 * tensors at a time and rounds the partial sum to `type` before the next 64. */
MOECCL_API moecclResult_t moecclExpertAllReduce(const void* send, void* recv, size_t count, moecclDataType_t type,
                                                moecclRedOp_t op, const moecclPlacement_t* placement, moecclComm_t comm,
                                                moecclStream_t stream);

/* Returns the size of a shard. An expert's `count` elements are cut into n_ranks shards of this many elements (the last
 * ones shorter or empty); shard r belongs to the optimizer of rank r. 0 if n_ranks is below 1. */
MOECCL_API size_t moecclExpertShard(size_t count, int n_ranks);

/* shards[n_experts][moecclExpertShard(count, n_ranks)]: shard `rank` of every expert's tensor, taken from one of its
 * replicas: this rank's own if it has one, otherwise the replicas' ranks in turn (Algorithm 2). Every expert must have
 * a slot. All replicas of an expert must hold equal data, as after moecclExpertAllReduce. Out of place only. */
MOECCL_API moecclResult_t moecclCollectGradients(const void* slots, void* shards, size_t count, moecclDataType_t type,
                                                 const moecclPlacement_t* placement, moecclComm_t comm,
                                                 moecclStream_t stream);
/* shards[n_experts][moecclExpertShard(count, n_ranks)]: shard `rank` of the sum (moecclSum) or mean (moecclAvg, over
 * the number of replicas) of every expert's gradient over all its replicas. The result is that of moecclExpertAllReduce
 * followed by moecclCollectGradients, with fewer bytes for every expert that is on two ranks or more. With one rank per
 * node, a rank sends (sN - s) / N experts (Appendix A.2), whereas the two calls send each sum twice; use them only if
 * replicas need the sums too. If the topology has nodes and two ranks of one node hold an expert, the node's ranks form
 * their sum first and the expert leaves the node once ("nodes"); otherwise each rank sends to the owners of the shards
 * ("direct"). If one does not fit the staging, the other runs. moecclPlanForce(comm, moecclOpReduceGradients, ...)
 * chooses between them, except on a deterministic communicator. Partial sums of ranks and nodes are rounded to `type`;
 * the result is the same in every run. Every expert must have a slot. Out of place only. */
MOECCL_API moecclResult_t moecclReduceGradients(const void* slots, void* shards, size_t count, moecclDataType_t type,
                                                moecclRedOp_t op, const moecclPlacement_t* placement, moecclComm_t comm,
                                                moecclStream_t stream);
/* slots[slots][count]: the weights of each slot's expert, assembled from the shards of all ranks,
 * shards[n_experts][moecclExpertShard(count, n_ranks)]. A rank receives an expert once, however many replicas it holds.
 * Empty slots are not written. Out of place only. */
MOECCL_API moecclResult_t moecclPlaceWeights(const void* shards, void* slots, size_t count, moecclDataType_t type,
                                             const moecclPlacement_t* placement, moecclComm_t comm,
                                             moecclStream_t stream);
/* One layer for moecclExpertLayers. */
typedef struct {
  const moecclPlacement_t* placement;
  void* slots;  /* [slots of this rank][count]; NULL where the rank has none */
  void* shards; /* [n_experts][moecclExpertShard(count, n_ranks)] */
} moecclExpertLayer_t;
/* Runs moecclReduceGradients, moecclCollectGradients or moecclPlaceWeights (`what`: their moecclOp_t) on
 * layers[n_layers] as one operation: ranks meet once, and the data of all layers that one rank sends to another travels
 * together. The layers' buffers may lie anywhere in one kind of memory, at distances that are multiples of the type's
 * size, but must not overlap. `count` and `type` apply to all layers; only moecclReduceGradients reads `op`. Placements
 * may differ. */
MOECCL_API moecclResult_t moecclExpertLayers(moecclOp_t what, const moecclExpertLayer_t* layers, size_t n_layers,
                                             size_t count, moecclDataType_t type, moecclRedOp_t op, moecclComm_t comm,
                                             moecclStream_t stream);
/* Sets *source to the rank from which moecclCollectGradients takes shard `rank` of expert `expert`. This call is not
 * collective. */
MOECCL_API moecclResult_t moecclGradientSource(const moecclPlacement_t* placement, int n_ranks, int expert, int rank,
                                               int* source);

/* counts[n_experts]: how often each expert occurs in topk_index[n_choices], over all ranks; -1 is not counted.
 * n_choices may differ between ranks and be 0. topk_index is read before the call returns. Either array may be CUDA
 * memory. In a group, counts in CUDA memory are written from this call on. */
MOECCL_API moecclResult_t moecclExpertPopularity(const int32_t* topk_index, size_t n_choices, int n_experts,
                                                 int64_t* counts, moecclComm_t comm, moecclStream_t stream);

/* How tokens are shared among replicas. It must be the same on all ranks. */
typedef struct {
  size_t size;                        /* sizeof(moecclReplicaDispatch_t) */
  const moecclPlacement_t* placement; /* with a slot for each expert that a token chooses */
  int32_t top_k;                      /* choices per token, 1..64 */
  int32_t slot_capacity;              /* most tokens that one slot takes from all ranks together; 0: no limit.
                                         Section 3.4: capacity_factor * tokens * top_k / slots */
} moecclReplicaDispatch_t;
#define MOECCL_REPLICA_DISPATCH_INIT \
  { sizeof(moecclReplicaDispatch_t), NULL, 0, 0 }

/* slot_index[n_tokens][top_k]: the slot to which each choice in topk_index[n_tokens][top_k] goes, numbered across all
 * ranks as in slot_expert, or -1 if topk_index is -1 or the choice is dropped (Section 3.2, steps 1 and 2). The result
 * is for moecclRoutingCreate or -Update of a layer that has an expert for each slot (n_experts: all slots; expert_rank:
 * the rank of each, NULL with equal slots). One such layer serves every placement. A dropped choice has no row, adds
 * nothing to combine and has gradient 0.
 *
 * The loads of an expert's slots differ by one token at most. A rank's tokens go to its own slots first, then to those
 * of its node. If an expert has more than slots * slot_capacity tokens, the excess is dropped: each rank loses its
 * share, rounded up or down, and keeps its first tokens. popularity[n_experts] and dropped[n_experts] may be NULL;
 * otherwise they get counts over all ranks: the choices of each expert, and how many of these were dropped.
 *
 * The call is collective: it makes one AllGather of n_experts counts, which replaces moecclExpertPopularity, and all
 * ranks then compute the same result. It blocks, and is not for groups (moecclInvalidUsage). topk_index and slot_index
 * may be CUDA memory. n_tokens may differ between ranks and be 0; all ranks together must make fewer than 2^31 choices.
 * If one rank's choices are wrong, the call fails on all ranks. */
MOECCL_API moecclResult_t moecclChooseReplicas(const moecclReplicaDispatch_t* dispatch, const int32_t* topk_index,
                                               size_t n_tokens, int32_t* slot_index, int64_t* popularity,
                                               int64_t* dropped, moecclComm_t comm);

/* Writes a page for a person about an operation with a plan (op: moecclOpExpertAllReduce, moecclOpCollectGradients,
 * moecclOpReduceGradients or moecclOpPlaceWeights): bytes per level, predicted time, this rank's steps. *needed (may be
 * NULL) gets the full length + 1. This call is not collective. moecclPlanForce() chooses "direct", "flat" or "nodes"
 * for moecclOpExpertAllReduce; by default the one with the lowest price runs, or the fastest of those whose prices are
 * close (MOECCL_TRIALS). */
MOECCL_API moecclResult_t moecclExpertExplain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                              const moecclPlacement_t* placement, char* text, size_t text_bytes,
                                              size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_EXPERTS_H_ */
