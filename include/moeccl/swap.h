/* SPDX-License-Identifier: Apache-2.0 */
/* Expert swap at run time (HierMoE, Section IV, HierD-ES). One object counts the choices that a model's layers route,
 * finds the two experts of a layer whose exchange minimizes the tokens' traffic, moves the experts' data while the
 * ranks compute, and changes where the live layer sends their tokens. Conventions: types.h.
 *
 *   moecclExpertSwapCreate   once per model            moecclExpertSwapAttach   once per layer
 *   moecclExpertSwapBegin    after the optimizer's step: counts, decides and moves data on a thread of the library
 *   moecclExpertSwapFinish   after the last backward pass, before the next optimizer's step: changes places
 *
 * Slots. Slot s of a layer is the place of expert s when the layer is created: permanently on rank expert_rank[s] of
 *   its config. Experts change places, slots do not. A rank's tensors hold its slots in ascending order, one after
 *   another.
 * Layers. After Attach, the numbers in topk_index mean experts, wherever these are now. local_experts in
 *   moecclRoutingInfo_t says which expert is in each of this rank's slots, so it need not be ascending. Everything else
 *   that is ordered by local expert, such as rows, is ordered by slot. A routing from before Attach, or from before a
 *   change of places, must be updated before it is used again (moecclInvalidUsage). The host reads choices in CUDA
 * memory. moecclRoutingUpdateOnStream, re-placing combine and layers with expert domains are moecclUnsupported.
 * Decisions. One AllReduce joins the counts and the times of steps and swaps. Every rank solves the same problem, and
 *   rank 0's answer counts, because hosts may round differently. The solver minimizes Eq. 8 for the algorithm that the
 *   layer's last update ran, so it follows "auto". A pair changes places if its predicted share of the measured time of
 *   the layer's operations, over `horizon` steps, exceeds the time that a swap of the layer took on the slowest rank,
 *   from the start of its transfer to its end.
 * Sums. Rows stay sorted by (source rank, token), so gradients of weights do not depend on where an expert is. A
 *   token's combine adds in the order of slots. The bits never change with top_k 1, nor with top_k 2 and rows of fp32
 * or fp64. Otherwise the last one may: two experts of a token on one rank are added before they are rounded to 16 bits.
 * Sharded optimizers. A tensor may have a different number of bytes per slot on each rank, and 0 on a rank that keeps
 *   none of it. Experts then change places only between ranks whose tensors have equal sizes. Data that is kept by
 *   expert number and not by slot (moecclCollectGradients' shards) stays where it is and is not passed.
 *
 * Order. The object has its own communicator, so its transfers do not delay the layers' operations. moecclCommAbort()
 *   and moecclCommRevoke() of the communicator that it was made with end them too. All ranks make all of its calls
 *   except Test and GetInfo in the same order, one thread at a time. If a transfer fails, the weights of ranks may
 *   differ: go back to a checkpoint.
 */
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
  int32_t max_tokens;               /* tokens of this rank that a count takes: the latest, of as many steps as that
                                       needs; 0: 4096 */
  moecclMaxFunction_t max_function; /* of Eq. 9 */
  double gamma;                     /* of Eq. 11; 0: 10 */
  double min_gain; /* least predicted share of a layer's time for which a pair moves; 0: 0.001, below 0: any gain */
  double horizon;  /* number of steps in which a swap must pay for itself; 0: 100 */
  double swap_us;  /* price of one swap; 0: as measured, and 1 ns per byte before the first one */
} moecclExpertSwapConfig_t;
#define MOECCL_EXPERT_SWAP_CONFIG_INIT \
  { sizeof(moecclExpertSwapConfig_t), 0, 0, moecclMaxSmooth, 0, 0, 0, 0 }

/* One tensor of a layer's experts: weights, gradients, an optimizer's moment. */
typedef struct {
  void* slots;         /* [slots of this rank][slot_bytes], host or CUDA memory; kept by the caller until Destroy */
  uint64_t slot_bytes; /* 0: nothing on this rank */
  int32_t at_finish;   /* 0: not written from Begin to Finish, so it travels during the step. 1: written meanwhile, as
                          gradients are, so Finish moves it and waits. The same on all ranks */
  int32_t reserved;    /* 0 */
} moecclSwapTensor_t;

typedef struct {
  size_t size; /* sizeof(moecclExpertSwapInfo_t), set by the caller */
  /* [n_experts] arrays of the layer's present places; they stay valid until the next Finish. */
  const int32_t* slot_of;   /* of each expert */
  const int32_t* expert_in; /* of each slot */
  uint64_t n_counts;        /* counts of the layer so far */
  uint64_t n_swaps;         /* pairs that have changed places */
  uint64_t n_unpaid;        /* pairs whose gain was too small for the cost of a swap */
  int32_t pair[2];          /* the best pair of the last count, even if it stayed; -1: none gained min_gain */
  double gain;              /* its predicted gain, as a share */
  double step_us;           /* measured time of the layer's operations in a step, on the median rank; 0: not known */
  double swap_us;           /* measured time of the layer's last swap on the slowest rank; 0: none yet */
  double exposed_us;        /* time of this rank's last Finish that changed places in this layer */
} moecclExpertSwapInfo_t;

/* This call is collective, as moecclCommSplit is: all ranks pass the same config; a difference is moecclMismatch. */
MOECCL_API moecclResult_t moecclExpertSwapCreate(moecclExpertSwap_t* swap, moecclComm_t comm,
                                                 const moecclExpertSwapConfig_t* config);
/* Waits for a transfer that has begun and changes no places. Layers keep their map, so they cannot be attached again,
 * and may be destroyed before or after. This call is not collective. */
MOECCL_API moecclResult_t moecclExpertSwapDestroy(moecclExpertSwap_t swap);

/* Attaches a layer with its tensors[n_tensors], at most 64. slot_of[n_experts] has the slot of each expert, as a
 * checkpoint stores it; NULL means that expert e is in slot e. *layer (may be NULL) gets the layer's number in this
 * object, from 0. Not allowed between Begin and Finish. Returns moecclInvalidUsage for a layer that was attached
 * before, also to an object that was destroyed, and moecclUnsupported for one with fewer experts than ranks or more
 * than 8192. */
MOECCL_API moecclResult_t moecclExpertSwapAttach(moecclExpertSwap_t swap, moecclMoe_t moe,
                                                 const moecclSwapTensor_t* tensors, int32_t n_tensors,
                                                 const int32_t* slot_of, int32_t* layer);
/* Counts a step and starts the count of the layers whose turn it is. Returns at once. CUDA work on the tensors must be
 * complete before Begin and before Finish. Returns moecclInvalidUsage if a Finish is missing. */
MOECCL_API moecclResult_t moecclExpertSwapBegin(moecclExpertSwap_t swap);
/* Sets *done to 1 if Finish would wait for no transfer except those of at_finish tensors, or if nothing has begun. */
MOECCL_API moecclResult_t moecclExpertSwapTest(moecclExpertSwap_t swap, int32_t* done);
/* Waits for everything that the last Begin has started. When it returns, the pairs that were found have changed places
 * on all ranks. *n_swaps (may be NULL) gets their number. Without a Begin it does nothing. */
MOECCL_API moecclResult_t moecclExpertSwapFinish(moecclExpertSwap_t swap, int32_t* n_swaps);
MOECCL_API moecclResult_t moecclExpertSwapGetInfo(moecclExpertSwap_t swap, int32_t layer, moecclExpertSwapInfo_t* info);

/* The levels of a communicator's topology, outermost first, with their figures in Eq. 8, as the object above passes
 * them to the solver; for a program that calls moecclSolveSwap (solve.h) by itself. The last level has one group for
 * each rank. The figures are those of the AlltoAlls in the profile or, without these, of the topology's links. Where
 * neither says anything, alphas are 0 and a byte costs 1 ns at every level. Entries from n_levels on are 0. */
typedef struct {
  size_t size; /* sizeof(moecclSwapLevels_t), set by the caller */
  int32_t n_ranks, n_levels;
  int32_t n_groups[MOECCL_MAX_LEVELS];
  double inter_alpha_us[MOECCL_MAX_LEVELS], inter_beta_us[MOECCL_MAX_LEVELS]; /* us, and us per byte */
  double intra_alpha_us[MOECCL_MAX_LEVELS], intra_beta_us[MOECCL_MAX_LEVELS];
} moecclSwapLevels_t;
/* Fills in *levels, the same on all ranks, and group_of_rank[n_levels][n_ranks], the group of each rank at each level.
 * group_of_rank may be NULL with max_groups 0; max_groups is its number of entries. Returns moecclInvalidArgument if
 * these are fewer than n_levels * n_ranks, and moecclUnsupported for more than MOECCL_MAX_LEVELS levels. This call is
 * not collective. */
MOECCL_API moecclResult_t moecclSwapLevels(moecclComm_t comm, moecclSwapLevels_t* levels, int32_t* group_of_rank,
                                           size_t max_groups);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SWAP_H_ */
