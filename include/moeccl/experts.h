/* SPDX-License-Identifier: Apache-2.0 */
/* Replicated experts: gradients and weights of experts that have any number of replicas on any ranks, several on one
 * rank included, under a placement that may change at every call ("Accelerating MoE Training with Adaptive Expert
 * Replication"). Conventions: types.h.
 *
 *   moecclExpertPopularity   tokens per expert over all ranks, from which the next placement is computed
 *   moecclChooseReplicas     the same, and the replica that serves each choice of a token, within the slots' capacity
 *   moecclExpertAllReduce    gradients: every replica gets the sum (or mean) over all replicas of its expert
 *   moecclCollectGradients   each rank gets its shard of every expert's gradient, for a uniformly sharded optimizer
 *   moecclReduceGradients    both in one: each rank gets its shard of the sum over all replicas of every expert
 *   moecclPlaceWeights       the way back: every slot of the (new) placement gets its expert's weights
 *   moecclExpertLayers       one of the last three for several layers at once
 *
 * All experts go in one call, without any set-up: no communicator is made for the ranks of an expert, and a placement
 * is an argument like any other. Every rank passes the same placement, count, type and operator; a difference is
 * moecclMismatch. Expert tensors all have `count` elements; slot s of a rank is at element s * count of its buffer. */
#ifndef MOECCL_EXPERTS_H_
#define MOECCL_EXPERTS_H_

#include <moeccl/comm.h>
#include <moeccl/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which expert each slot holds. Read before a call returns. */
typedef struct {
  size_t size;                /* sizeof(moecclPlacement_t) */
  int32_t n_experts;          /* 1 or more */
  int32_t slots_per_rank;     /* of every rank; ignored when slot_counts is given */
  const int32_t* slot_counts; /* [n_ranks] slots of each rank, or NULL */
  const int32_t* slot_expert; /* [sum of slots], rank after rank: the slot's expert, -1 for an empty slot */
} moecclPlacement_t;
#define MOECCL_PLACEMENT_INIT \
  { sizeof(moecclPlacement_t), 0, 0, NULL, NULL }

/* recv[slots][count]: for each slot the reduction of send[slots][count] over all replicas of the slot's expert on all
 * ranks: moecclSum, or moecclAvg, which divides by the number of replicas (Section 4.1). Replicas in one rank are added
 * up before anything is sent. All replicas of an expert get bit-identical results, and the same ones at every run; the
 * partial sums of ranks are rounded to `type`. Empty slots of recv are not written. In place: send == recv.
 * An expert may have any number of replicas. A kernel on CUDA memory adds up 64 tensors at a time and rounds what it
 * has to `type` before the next 64. */
MOECCL_API moecclResult_t moecclExpertAllReduce(const void* send, void* recv, size_t count, moecclDataType_t type,
                                                moecclRedOp_t op, const moecclPlacement_t* placement, moecclComm_t comm,
                                                moecclStream_t stream);

/* Shards: an expert's `count` elements are cut into n_ranks parts of moecclExpertShard() elements (the last ones
 * shorter or empty); part r belongs to the optimizer of rank r. */
MOECCL_API size_t moecclExpertShard(size_t count, int n_ranks);

/* shards[n_experts][moecclExpertShard(count, n_ranks)]: part `rank` of every expert's tensor, taken from one of its
 * replicas: from this rank's own where there is one, else from the replicas' ranks in turn (Algorithm 2). Every expert
 * must have a slot. What replicas hold must be equal, as after moecclExpertAllReduce. Out of place only. */
MOECCL_API moecclResult_t moecclCollectGradients(const void* slots, void* shards, size_t count, moecclDataType_t type,
                                                 const moecclPlacement_t* placement, moecclComm_t comm,
                                                 moecclStream_t stream);
/* shards[n_experts][moecclExpertShard(count, n_ranks)]: part `rank` of the sum (moecclSum) or mean (moecclAvg, over the
 * number of replicas) of every expert's gradient over all its replicas: what moecclExpertAllReduce and
 * moecclCollectGradients give together, with fewer bytes wherever an expert is on two ranks or more. With one rank a
 * node a rank sends (sN - s) / N experts (Appendix A.2); the two calls send each sum twice. Use them where replicas
 * need the sums, too. Where the topology has nodes and two ranks of one hold an expert, the node's ranks add up first
 * and an expert leaves the node once ("nodes"); else each rank sends to the owners of the shards ("direct");
 * moecclPlanForce(comm, moecclOpReduceGradients, ...) chooses. Partial sums of ranks and nodes are rounded to `type`;
 * the result is the same at every run. Every expert must have a slot. Out of place only. */
MOECCL_API moecclResult_t moecclReduceGradients(const void* slots, void* shards, size_t count, moecclDataType_t type,
                                                moecclRedOp_t op, const moecclPlacement_t* placement, moecclComm_t comm,
                                                moecclStream_t stream);
/* slots[slots][count]: the weights of each slot's expert, put together from the shards of all ranks,
 * shards[n_experts][moecclExpertShard(count, n_ranks)]. A rank receives an expert once, however many replicas it holds.
 * Empty slots are not written. Out of place only. */
MOECCL_API moecclResult_t moecclPlaceWeights(const void* shards, void* slots, size_t count, moecclDataType_t type,
                                             const moecclPlacement_t* placement, moecclComm_t comm,
                                             moecclStream_t stream);
/* One layer of moecclExpertLayers. */
typedef struct {
  const moecclPlacement_t* placement;
  void* slots;  /* [slots of this rank][count]; NULL where the rank has none */
  void* shards; /* [n_experts][moecclExpertShard(count, n_ranks)] */
} moecclExpertLayer_t;
/* moecclReduceGradients, moecclCollectGradients or moecclPlaceWeights (`what`: their moecclOp_t) of layers[n_layers] as
 * one operation: ranks meet once, and what one rank sends to another of all layers travels together. The layers'
 * buffers may lie anywhere, of one kind of memory, apart by a multiple of the type's size; none may overlap another
 * one. `count` and `type` are of all layers; `op` is read by moecclReduceGradients alone. Placements may differ. */
MOECCL_API moecclResult_t moecclExpertLayers(moecclOp_t what, const moecclExpertLayer_t* layers, size_t n_layers,
                                             size_t count, moecclDataType_t type, moecclRedOp_t op, moecclComm_t comm,
                                             moecclStream_t stream);
/* *source: the rank from which moecclCollectGradients takes the shard of `rank` of expert `expert`. Not collective. */
MOECCL_API moecclResult_t moecclGradientSource(const moecclPlacement_t* placement, int n_ranks, int expert, int rank,
                                               int* source);

/* counts[n_experts]: how often each expert stands in topk_index[n_choices], over all ranks; -1 is not counted.
 * n_choices may differ between ranks and be 0. topk_index is read before the call returns. Either may be CUDA memory.
 */
MOECCL_API moecclResult_t moecclExpertPopularity(const int32_t* topk_index, size_t n_choices, int n_experts,
                                                 int64_t* counts, moecclComm_t comm, moecclStream_t stream);

/* How tokens are shared among replicas. The same on all ranks. */
typedef struct {
  size_t size;                        /* sizeof(moecclReplicaDispatch_t) */
  const moecclPlacement_t* placement; /* with a slot for each expert that a token chooses */
  int32_t top_k;                      /* choices of a token, 1..64 */
  int32_t slot_capacity;              /* most tokens that one slot takes, of all ranks together; 0: no limit.
                                         Section 3.4: capacity_factor * tokens * top_k / slots */
} moecclReplicaDispatch_t;
#define MOECCL_REPLICA_DISPATCH_INIT \
  { sizeof(moecclReplicaDispatch_t), NULL, 0, 0 }

/* slot_index[n_tokens][top_k]: the slot that each choice of topk_index[n_tokens][top_k] goes to, counted through all
 * ranks as in slot_expert; -1 where topk_index is -1 and where the choice is dropped (Section 3.2, steps 1 and 2). For
 * moecclRoutingCreate or -Update of a layer with an expert for each slot (n_experts: all slots; expert_rank: the rank
 * of each, NULL with equal slots), which serves every placement: a dropped choice has no row, adds nothing to combine
 * and has gradient 0.
 *
 * The loads of an expert's slots differ by one token at most. A rank's tokens go to its own slots first, then to those
 * of its node. Above slots * slot_capacity tokens of an expert the rest are dropped: each rank loses its share, rounded
 * either way, and its first tokens stay. popularity[n_experts] and dropped[n_experts], NULL or counts over all ranks:
 * the choices of each expert, and those of them that were dropped.
 *
 * Collective: one AllGather of n_experts counts, which takes the place of moecclExpertPopularity; all that follows is
 * computed alike on all ranks. Blocks; topk_index and slot_index may be CUDA memory. n_tokens may differ between ranks
 * and be 0; all ranks together make fewer than 2^31 choices. Wrong choices of one rank fail the call on all. */
MOECCL_API moecclResult_t moecclChooseReplicas(const moecclReplicaDispatch_t* dispatch, const int32_t* topk_index,
                                               size_t n_tokens, int32_t* slot_index, int64_t* popularity,
                                               int64_t* dropped, moecclComm_t comm);

/* A page for a person about the calls that have a plan (op: moecclOpExpertAllReduce, moecclOpCollectGradients,
 * moecclOpReduceGradients or moecclOpPlaceWeights): bytes per level, predicted time, this rank's steps. *needed (may be
 * NULL) gets the full length
 * + 1. Not collective. moecclPlanForce(comm, moecclOpExpertAllReduce, "flat" or "nodes") chooses the algorithm; by
 * itself "nodes" runs where the topology has nodes. */
MOECCL_API moecclResult_t moecclExpertExplain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                              const moecclPlacement_t* placement, char* text, size_t text_bytes,
                                              size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_EXPERTS_H_ */
