/* SPDX-License-Identifier: Apache-2.0 */
/* Expert swap at run time (HierMoE, Section IV, HierD-ES): one object counts what a model's layers route, finds the two
 * experts of a layer whose exchange makes tokens travel least, moves what belongs to them while the ranks compute, and
 * changes where the live layer sends their tokens. Conventions: types.h.
 *
 *   moecclExpertSwapCreate   once per model            moecclExpertSwapAttach   once per layer
 *   moecclExpertSwapBegin    behind the optimizer's step: counts, decides and moves on a thread of the library
 *   moecclExpertSwapFinish   before the next optimizer's step, behind the last backward pass: changes places
 *
 * Slots. Slot s of a layer is where expert s is when the layer is made: on rank expert_rank[s] of its config, for ever.
 *   Experts change places, slots do not. A rank's tensors hold its slots in ascending order, one after another.
 * Layers. From Attach on, numbers in topk_index are experts' wherever these lie now. local_experts of
 *   moecclRoutingInfo_t says which expert each of this rank's slots holds, so it need not ascend; what else is by local
 *   expert, rows among it, is by slot. Routings from before a change of places must be updated before they are used
 *   again (moecclInvalidUsage). Choices in CUDA memory are read by the host; moecclRoutingUpdateOnStream, re-placing
 *   combine and layers with expert domains are moecclUnsupported.
 * Decisions. Counts, and what steps and swaps took, are joined by one AllReduce, and all ranks solve the same problem
 *   for themselves. The solver minimises Eq. 8 for the algorithm that the layer's last update ran, so it follows
 * "auto". A pair changes places when the predicted share of the measured time of the layer's operations, over `horizon`
 *   steps, is more than a swap of the layer took, on the slowest rank, from the beginning of its transfer to its end.
 * Sums. Rows stay sorted by (source rank, token), so gradients of weights do not depend on where an expert is. A
 *   token's combine adds in the order of slots: with top_k 1 and 2 bits never change, with more they may in the last
 *   place.
 * Sharded optimizers. A tensor may have another number of bytes a slot on each rank, 0 where a rank keeps none of it.
 *   Experts then change places only between ranks whose tensors have equal sizes. What is kept by number of expert and
 *   not by slot (moecclCollectGradients' shards) stays where it is, and is not given.
 * Order. The object has a communicator of its own, so its transfers hold up no operation of the layers'. All its calls
 *   but Test and GetInfo are made by all ranks in the same order; one thread at a time. When a transfer fails the
 * ranks' weights may differ: go back to a checkpoint. */
#ifndef MOECCL_SWAP_H_
#define MOECCL_SWAP_H_

#include <moeccl/moe.h>
#include <moeccl/solve.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct moecclExpertSwap* moecclExpertSwap_t;

typedef struct {
  size_t size;                      /* sizeof(moecclExpertSwapConfig_t) */
  int32_t interval;                 /* steps from one count of a layer to its next; layers take turns. 0: 4 */
  int32_t max_tokens;               /* of this rank that a count takes, the last ones; 0: 4096 */
  moecclMaxFunction_t max_function; /* of Eq. 9 */
  double gamma;                     /* of Eq. 11; 0: 10 */
  double min_gain; /* predicted share of a layer's time below which a pair stays; 0: 0.001, below 0: any gain */
  double horizon;  /* steps that a swap has to pay for itself; 0: 100 */
  double swap_us;  /* price of one swap; 0: as measured, and before the first one 1 ns a byte */
} moecclExpertSwapConfig_t;
#define MOECCL_EXPERT_SWAP_CONFIG_INIT \
  { sizeof(moecclExpertSwapConfig_t), 0, 0, moecclMaxSmooth, 0, 0, 0, 0 }

/* One tensor of a layer's experts: weights, gradients, an optimizer's moment. */
typedef struct {
  void* slots;         /* [slots of this rank][slot_bytes], host or CUDA memory; kept by the caller until Destroy */
  uint64_t slot_bytes; /* 0: nothing on this rank */
  int32_t at_finish;   /* 0: not written from Begin to Finish, so it travels behind the step. 1: written there, as
                          gradients are, so Finish moves it and waits. The same on all ranks */
  int32_t reserved;    /* 0 */
} moecclSwapTensor_t;

typedef struct {
  size_t size; /* sizeof(moecclExpertSwapInfo_t), set by the caller */
  /* [n_experts], of the layer's present places; they live until the next Finish. */
  const int32_t* slot_of;   /* of each expert */
  const int32_t* expert_in; /* each slot */
  uint64_t n_counts;        /* of the layer so far */
  uint64_t n_swaps;         /* pairs that have changed places */
  uint64_t n_unpaid;        /* pairs that gained too little for what a swap costs */
  int32_t pair[2];          /* of the last count: the best pair, also when it stayed; -1: none gained min_gain */
  double gain;              /* predicted for it, as a share */
  double step_us;           /* measured: the layer's operations of a step, the middle rank's; 0: not known */
  double swap_us;           /* measured: the last swap of the layer on the slowest rank; 0: none yet */
  double exposed_us;        /* this rank's last Finish that changed places in this layer: how long it took */
} moecclExpertSwapInfo_t;

/* Collective, as moecclCommSplit is: all ranks give the same config, a difference is moecclMismatch. */
MOECCL_API moecclResult_t moecclExpertSwapCreate(moecclExpertSwap_t* swap, moecclComm_t comm,
                                                 const moecclExpertSwapConfig_t* config);
/* Waits for what has begun, and changes no places. Layers keep their map, and may go before or after. Not collective.
 */
MOECCL_API moecclResult_t moecclExpertSwapDestroy(moecclExpertSwap_t swap);

/* The layer's tensors[n_tensors], at most 64. slot_of[n_experts]: the slot of each expert, as a checkpoint has it;
 * NULL: expert e is in slot e. *layer (may be NULL): the layer's number here, from 0. Not between Begin and Finish.
 * moecclInvalidUsage for a layer that is attached already, moecclUnsupported for one with fewer experts than ranks. */
MOECCL_API moecclResult_t moecclExpertSwapAttach(moecclExpertSwap_t swap, moecclMoe_t moe,
                                                 const moecclSwapTensor_t* tensors, int32_t n_tensors,
                                                 const int32_t* slot_of, int32_t* layer);
/* Counts a step, and starts the count of the layers whose turn it is. Returns at once. moecclInvalidUsage when a Finish
 * is missing. */
MOECCL_API moecclResult_t moecclExpertSwapBegin(moecclExpertSwap_t swap);
/* *done: 1 when Finish would wait for no transfer but of at_finish tensors; also when nothing has begun. */
MOECCL_API moecclResult_t moecclExpertSwapTest(moecclExpertSwap_t swap, int32_t* done);
/* Waits for what the last Begin has started; pairs that were found then have changed places, on all ranks, when it
 * returns. *n_swaps (may be NULL): how many. Without a Begin it does nothing. */
MOECCL_API moecclResult_t moecclExpertSwapFinish(moecclExpertSwap_t swap, int32_t* n_swaps);
MOECCL_API moecclResult_t moecclExpertSwapGetInfo(moecclExpertSwap_t swap, int32_t layer, moecclExpertSwapInfo_t* info);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SWAP_H_ */
