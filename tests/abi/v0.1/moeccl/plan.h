/* Plans: which algorithm runs an operation, why, and how to force another. Conventions: types.h. */
#ifndef MOECCL_PLAN_H_
#define MOECCL_PLAN_H_

#include <moeccl/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
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
  moecclOpExpertGather = 15,   /* hybrid.h */
  moecclOpTensorAllToAll = 16, /* pipeline.h */
  moecclOpExpertReduce = 17    /* hybrid.h */
} moecclOp_t;
#define MOECCL_NUM_OPS 18

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
  int32_t trial; /* plans are tried in the program's own operations (MOECCL_TRIALS): 0 no, 1 still, 2 and decided */
} moecclPlanInfo_t;

/* The plan that would run `op` with this count (as in the operation's own call), type and operator. Not collective. */
MOECCL_API moecclResult_t moecclPlanQuery(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                          moecclPlanInfo_t* info);
/* A page for a person: candidates with predicted times, the choice, bytes per level, predicted beside measured, this
 * rank's steps. *needed (may be NULL) gets the full length + 1. Not collective. */
MOECCL_API moecclResult_t moecclPlanExplain(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                            char* text, size_t text_bytes, size_t* needed);
/* Forces an algorithm for an operation; NULL or "auto" returns to the choice by price. All ranks force the same, a
 * difference is moecclMismatch at the next operation. The environment does the same:
 * MOECCL_PLAN=allreduce:ring,alltoall:2dh. moecclInvalidArgument lists the algorithms when the name is unknown. */
MOECCL_API moecclResult_t moecclPlanForce(moecclComm_t comm, moecclOp_t op, const char* algorithm);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PLAN_H_ */
