/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tensor-parallel AllToAll (MoNTA): exchange between nodes of data that all ranks of a node hold alike, as activations
 * are under tensor parallelism, and when each lane of a plan was busy. Conventions: types.h.
 *
 * A tensor group is the ranks of the topology's innermost level above the ranks ("node:2 gpu:8": two groups of eight);
 * all ranks when the topology has none. e groups, numbered as in the topology; a group of t ranks. Groups may differ in
 * size.
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
/* How the communicator's topology groups its ranks. Not collective. */
MOECCL_API moecclResult_t moecclTensorGroups(moecclComm_t comm, moecclTensorGroups_t* groups);

/* recv[e][count]: block g is block `own group` of group g's send[e][count]. The ranks of a group give equal send
 * buffers (not checked: unequal ones give a mixture) and all get the same recv, to the bit, by every algorithm. It is
 * its own inverse: the way back after the experts is the same call on the experts' results. Out of place only. count
 * may be 0. Algorithms for moecclPlanForce(comm, moecclOpTensorAllToAll, ...): "baseline", "o1", "o2", "o3" (MoNTA,
 * Table 6) and "lean"; by itself the cheapest runs, in as many chunks as moecclSolveChunks says (Algorithms 1 to 3). */
MOECCL_API moecclResult_t moecclTensorAllToAll(const void* send, void* recv, size_t count, moecclDataType_t type,
                                               moecclComm_t comm, moecclStream_t stream);

/* The same with blocks of any size, such as the rows of the tokens that chose a group's experts: dispatch of a
 * tensor-parallel group, and combine as its mirror. counts[e][e]: elements that group s sends to group d, at s * e + d;
 * the same on all ranks (else moecclMismatch). send: the blocks of this rank's group for groups 0, 1, ..., one after
 * the other; recv: those that groups 0, 1, ... sent to it, likewise. The ranks of a group give equal send buffers and
 * all get the same recv. Each element crosses between groups once: rank k of group d takes part k of a block from one
 * rank of group s, and passes it on inside its group; parts differ in size when the ranks do not divide the block. With
 * the counts transposed it is its own inverse: the way back, and both backwards. counts is read before the call
 * returns; out of place only; counts may be 0. One algorithm. */
MOECCL_API moecclResult_t moecclTensorAllToAllv(const void* send, void* recv, const size_t* counts,
                                                moecclDataType_t type, moecclComm_t comm, moecclStream_t stream);

typedef enum MOECCL_INT {
  moecclLaneMain = 0,
  moecclLaneInter = 1,
  moecclLaneIntra = 2,
  moecclLaneCopy = 3
} moecclLaneKind_t;
/* When a lane was busy with a chunk, from the operation's start on: from the first byte of this rank's transfers on the
 * link (its first copy) until the last. On a paced link that is the time on the emulated wire. */
typedef struct {
  moecclLaneKind_t lane;
  uint32_t chunk;
  double start_us, end_us;
} moecclLaneSpan_t;
/* Of the last run on this rank of the plan that moecclPlanQuery would show, ordered by lane and chunk:
 * spans[max_spans], *n_spans: how many there are (may exceed max_spans; spans may be NULL with 0), 0 before the first
 * run. Recorded for moecclOpTensorAllToAll on host memory, at most 1024 chunks. Not collective. */
MOECCL_API moecclResult_t moecclPlanTimeline(moecclComm_t comm, moecclOp_t op, size_t count, moecclDataType_t type,
                                             moecclLaneSpan_t* spans, size_t max_spans, size_t* n_spans);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_PIPELINE_H_ */
