/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: which algorithm runs an operation, why, and how to force another. Conventions: types.h. */
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

/* The name of an operation, such as "allreduce" or "reduce_scatter", as MOECCL_PLAN and messages spell it; "unknown
 * operation" beyond the last. Never NULL. */
MOECCL_API const char* moecclOpName(moecclOp_t op);
/* The algorithms that moecclPlanForce() knows for `op`, separated by commas, such as "oneshot,direct,ring"; empty where
 * an operation has one plan or none. text [text_bytes] gets them, cut like snprintf's; *needed (may be NULL) the full
 * length + 1. They need not all apply to a given call. From any thread. moecclInvalidArgument when op is none. */
MOECCL_API moecclResult_t moecclPlanList(moecclOp_t op, char* text, size_t text_bytes, size_t* needed);

typedef struct {
  size_t size;         /* sizeof(moecclPlanInfo_t), set by the caller */
  char algorithm[32];  /* "staged", "direct", "ring", "tree", "rd", ... */
  uint64_t hash;       /* equal on all ranks */
  double predicted_us; /* under the profile */
  double measured_us;  /* the last run of this shape class on this rank; 0 before the first */
  uint64_t wire_bytes; /* bytes that this rank sends to others */
  uint32_t n_steps;    /* steps of this rank per chunk */
  uint32_t n_chunks;
  int32_t emulated;
  int32_t trial;   /* plans are tried in the program's own operations (MOECCL_TRIALS): 0 no, 1 still, 2 and decided */
  char forced[32]; /* the forced algorithm, which is not `algorithm` where it does not apply; "": none is forced */
  char note[192];  /* why it does not apply to this call; "": it does */
} moecclPlanInfo_t;

/* The plan that would run `op` with this count (as in the operation's own call), type and operator. Not collective. */
MOECCL_API moecclResult_t moecclPlanQuery(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                          moecclPlanInfo_t* info);
/* A page for a person: candidates with predicted times, the choice, bytes per level, predicted beside measured, this
 * rank's steps. *needed (may be NULL) gets the full length + 1. Not collective. */
MOECCL_API moecclResult_t moecclPlanExplain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                            char* text, size_t text_bytes, size_t* needed);
/* Proves the plans that moecclPlanExplain would show: by symbols instead of numbers, that every rank ends with the
 * right bytes in every order that the plan's signals allow, that it meets no deadlock and moves nothing in vain.
 * moecclInternalError names rank, lane and step. Takes time and memory that grow with the square of the ranks (64
 * ranks: about a second). MOECCL_CHECK_PLANS=1 proves each plan of a standard collective when it is built. Not
 * collective. */
MOECCL_API moecclResult_t moecclPlanProve(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type);
/* Forces an algorithm for an operation: every call to which it applies runs by it, whatever the prices. NULL or "auto"
 * returns to the choice by price. An algorithm may apply to some sizes and kinds of memory only ("oneshot" to what fits
 * the staging, "direct" to buffers that peers can reach); other calls then run as if nothing were forced, and
 * moecclPlanQuery (note), moecclPlanExplain and one warning in the log for each class of sizes say why. All ranks force
 * the same, a difference is moecclMismatch at the next operation. moecclInvalidArgument lists the algorithms when the
 * name is unknown; moecclUnsupported says why when it can never apply on this communicator, which then goes on as
 * before. The environment does the same: MOECCL_PLAN=allreduce:ring,alltoall:2dh; as that is for all communicators of a
 * process, one on which it can never apply warns and goes on. */
MOECCL_API moecclResult_t moecclPlanForce(moecclComm_t comm, moecclOp_t op, const char* algorithm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PLAN_H_ */
