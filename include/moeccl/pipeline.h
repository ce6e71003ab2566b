/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor-parallel AllToAll (MoNTA): exchanges, between nodes, data that all ranks of a node hold alike, as activations
 * are under tensor parallelism. Also reports when each lane of a plan was busy. Conventions: types.h.
 *
 * A tensor group consists of the ranks in one unit of the topology's innermost level above the ranks ("node:2
 * gpu:8": two groups of eight), or of all ranks if the topology has no such level. There are e groups, numbered as in
 * the topology; a group has t ranks. Groups may differ in size.
 */
#ifndef MOECCL_PIPELINE_H_
#define MOECCL_PIPELINE_H_

#include <moeccl/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  size_t size;          /* sizeof(moecclTensorGroups_t), set by the caller */
  int32_t n_groups;     /* e: blocks of send and recv */
  int32_t group, index; /* this rank's group and its place in it */
  int32_t n_ranks;      /* t: ranks of this rank's group */
} moecclTensorGroups_t;
/* Tells how the communicator's topology groups its ranks. This call is not collective. */
MOECCL_API moecclResult_t moecclTensorGroups(moecclComm_t comm, moecclTensorGroups_t* groups);

/* recv[e][count]: block g is block `own group` of group g's send[e][count]. The ranks of a group must pass equal send
 * buffers (this is not checked; unequal ones give a mixture), and all get the same recv, to the bit, from every
 * algorithm. The operation is its own inverse: the way back after the experts is the same call on the experts' results.
 * Out of place only; count may be 0. The algorithms for moecclPlanForce(comm, moecclOpTensorAllToAll, ...) are
 * "baseline", "o1", "o2", "o3" (MoNTA, Table 6) and "lean". By default the cheapest one runs, in as many chunks as
 * moecclSolveChunks suggests (Algorithms 1 to 3). */
MOECCL_API moecclResult_t moecclTensorAllToAll(const void* send, void* recv, size_t count, moecclDataType_t type,
                                               moecclComm_t comm, moecclStream_t stream);

/* As moecclTensorAllToAll, but with blocks of any size, such as the rows of the tokens that chose a group's experts. It
 * serves as dispatch of a tensor-parallel group and, mirrored, as combine. counts[e][e] has the number of elements that
 * group s sends to group d at s * e + d, and is the same on all ranks (else moecclMismatch). send holds the blocks of
 * this rank's group for groups 0, 1, ..., one after another; recv holds the blocks that groups 0, 1, ... sent to it, in
 * the same way. The ranks of a group pass equal send buffers, and all get the same recv. Each element crosses between
 * groups once: rank k of group d takes part k of a block from one rank of group s and passes it on inside its group;
 * the parts differ in size if the number of ranks does not divide the block. With transposed counts the operation is
 * its own inverse, which gives the way back and both backward passes. counts is read before the call returns. Out of
 * place only; counts may be 0, and their sum is at most 2^36 elements. There is only one algorithm. */
MOECCL_API moecclResult_t moecclTensorAllToAllv(const void* send, void* recv, const size_t* counts,
                                                moecclDataType_t type, moecclComm_t comm, moecclStream_t stream);

typedef enum MOECCL_INT {
  moecclLaneMain = 0,
  moecclLaneInter = 1,
  moecclLaneIntra = 2,
  moecclLaneCopy = 3
} moecclLaneKind_t;
/* When a lane was busy with a chunk, measured from the operation's start: from the first to the last byte of this
 * rank's transfers on the link (for the copy lane, of its copies). On a paced link this is the time on the emulated
 * wire. */
typedef struct {
  moecclLaneKind_t lane;
  uint32_t chunk;
  double start_us, end_us;
} moecclLaneSpan_t;
/* Gets the lane times of the last run on this rank of the plan that moecclPlanQuery would show, ordered by lane and
 * chunk, in spans[max_spans]. *n_spans is their number, 0 before the first run; it may exceed max_spans, and spans may
 * be NULL with 0. Times are recorded for moecclOpTensorAllToAll on host memory with at most 1024 chunks. This call is
 * not collective. */
MOECCL_API moecclResult_t moecclPlanTimeline(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                             moecclLaneSpan_t* spans, size_t max_spans, size_t* n_spans);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PIPELINE_H_ */
