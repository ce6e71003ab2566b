/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: which algorithm runs an operation, why, and how to force another one. Conventions: types.h. */
#ifndef MOECCL_PLAN_H_
#define MOECCL_PLAN_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MOECCL_INT {
  moecclOpAllReduce = 0,
  moecclOpReduce = 1,
  moecclOpBroadcast = 2,
  moecclOpAllGather = 3,
  moecclOpReduceScatter = 4,
  moecclOpAllToAll = 5,
  moecclOpAllToAllv = 6,
  moecclOpGather = 7,
  moecclOpScatter = 8,
  moecclOpSendRecv = 9,
  moecclOpDispatch = 10,
  moecclOpCombine = 11,
  moecclOpExpertAllReduce = 12, /* experts.h */
  moecclOpCollectGradients = 13,
  moecclOpPlaceWeights = 14,
  moecclOpExpertGather = 15,    /* hybrid.h */
  moecclOpTensorAllToAll = 16,  /* pipeline.h */
  moecclOpExpertReduce = 17,    /* hybrid.h */
  moecclOpReduceGradients = 18, /* experts.h */
  moecclOpTensorAllToAllv = 19  /* pipeline.h */
} moecclOp_t;
#define MOECCL_NUM_OPS 20
/* Returns the name of an operation, such as "allreduce" or "reduce_scatter", as MOECCL_PLAN and messages spell it;
 * "unknown operation" for any other value. Never NULL. */
MOECCL_API const char* moecclOpName(moecclOp_t op);
/* Lists the algorithms that moecclPlanForce() knows for `op`, separated by commas, such as "oneshot,direct,ring". The
 * list is empty where there is nothing to force (moecclOpSendRecv, moecclOpCombine), and not every algorithm in it
 * applies to every call. text[text_bytes] gets the list, truncated as by snprintf; *needed (may be NULL) gets its full
 * length + 1. The function may be called from any thread. Returns moecclInvalidArgument if op is not an operation. */
MOECCL_API moecclResult_t moecclPlanList(moecclOp_t op, char* text, size_t text_bytes, size_t* needed);

typedef struct {
  size_t size;         /* sizeof(moecclPlanInfo_t), set by the caller */
  char algorithm[32];  /* "staged", "direct", "ring", "tree", "rd", ... */
  uint64_t hash;       /* equal on all ranks */
  double predicted_us; /* under the profile */
  double measured_us;  /* of the last run of this shape class on this rank; 0 before the first */
  uint64_t wire_bytes; /* bytes that this rank sends to other ranks */
  uint32_t n_steps;    /* steps of this rank per chunk */
  uint32_t n_chunks;
  int32_t emulated;
  int32_t trial;   /* plans are tried in the program's own operations (MOECCL_TRIALS): 0 no, 1 still, 2 and decided */
  char forced[32]; /* the forced algorithm, which differs from `algorithm` where it does not apply; "" if none is */
  char note[192];  /* why the forced algorithm does not apply to this call; "" if it does */
} moecclPlanInfo_t;

/* Gets the plan that would run `op` with this type and this count (as in the operation's own call). Like
 * moecclPlanExplain, it builds and prices the programs of all ranks, which takes seconds and GiBs for some plans of
 * thousands of ranks. This call is not collective. */
MOECCL_API moecclResult_t moecclPlanQuery(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                          moecclPlanInfo_t* info);
/* Writes a page for a person: candidates with predicted times, the choice, bytes per level, predicted and measured
 * times side by side, and this rank's steps. *needed (may be NULL) gets the full length + 1. This call is not
 * collective. */
MOECCL_API moecclResult_t moecclPlanExplain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                            char* text, size_t text_bytes, size_t* needed);
/* Proves the plans that moecclPlanExplain would show. It uses symbols instead of numbers to prove that every rank ends
 * with the right bytes in every order that the plan's signals allow, that the plan cannot deadlock, and that it moves
 * nothing in vain. moecclInternalError names the rank, lane and step. Time and memory grow with the square of the
 * number of ranks (64 ranks take about a second). MOECCL_CHECK_PLANS=1 proves each plan of a standard collective, of
 * replicated experts and of expert domains when it is built. This call is not collective. */
MOECCL_API moecclResult_t moecclPlanProve(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type);
/* Forces an algorithm for an operation: every call that it applies to uses it, whatever the prices. NULL or "auto"
 * returns to the choice by price. An algorithm may apply only to some sizes and kinds of memory ("oneshot" to data that
 * fits the staging, "direct" to buffers that peers can reach). Other calls then run as if nothing were forced, and
 * moecclPlanQuery (note), the Explain functions and one warning in the log per size class say why. For moecclOpDispatch
 * this holds for each layer that is created afterwards without an algorithm of its own. All ranks must force the same
 * algorithm; a difference is moecclMismatch at the next operation. For an unknown name moecclInvalidArgument lists
 * the algorithms. moecclUnsupported says why an algorithm can never apply on this communicator, which then goes on as
 * before. MOECCL_PLAN=allreduce:ring,alltoall:2dh does the same from the environment, for all communicators of a
 * process; a communicator on which the algorithm can never apply warns and goes on. */
MOECCL_API moecclResult_t moecclPlanForce(moecclComm_t comm, moecclOp_t op, const char* algorithm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PLAN_H_ */
