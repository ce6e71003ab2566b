/* SPDX-License-Identifier: Apache-2.0 */
/* Simulation: how long an operation would take on a cluster that is not at hand. Conventions: types.h. */
#ifndef MOECCL_SIMULATE_H_
#define MOECCL_SIMULATE_H_

#include <moeccl/moe.h>
#include <moeccl/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  size_t size;           /* sizeof(moecclSimulateConfig_t) */
  const char* topology;  /* "node:2(bw=50GB/s) gpu:8", or a file: such a text, JSON, hwloc's XML; or "auto": this host
                            (docs/topology.md) */
  const char* profile;   /* profile file (docs/calibration.md); NULL: the defaults, with the topology's links */
  moecclOp_t op;         /* a standard collective except AllToAllv; moecclOpTensorAllToAll; moecclOpDispatch: dispatch
                            and combine of a routing; moecclOpExpertGather, moecclOpExpertReduce: moecclHybridGather,
                            moecclHybridReduce */
  const char* algorithm; /* NULL or "auto": all that apply */
  int32_t json;          /* 1: the page is JSON, for programs */
  int32_t reserved;
  /* For standard collectives and for experts that move in domains (these also use n_experts, expert_rank and domain,
   * below). */
  size_t count; /* elements, as in the operation's call; for experts, of one expert */
  moecclDataType_t type;
  int32_t one_host; /* 1: ranks map each other's memory; 0: they can only put, as between hosts */
  /* For dispatch and combine. */
  size_t hidden_bytes;        /* bytes per row; 0: 14336 */
  size_t tokens_per_rank;     /* 0: 512, or all tokens of a trace */
  int32_t top_k;              /* 0: 8, or the trace's */
  int32_t n_experts;          /* 0: 256, or the trace's */
  const char* routing;        /* NULL: "uniform"; "zipf:1.2"; "trace:PATH[:LAYER:STEP]" (perf/TRACE.md) */
  uint64_t seed;              /* for a generated routing */
  const int32_t* expert_rank; /* [n_experts] owner of each expert; NULL: contiguous */
  int32_t n_levels;           /* entries of domain */
  const int32_t* domain;      /* [n_levels] sizes of expert domains (hybrid.h), outermost first; NULL: none */
  moecclMoeLayout_t layout;   /* of dispatch and combine: in Rows, flat and 2dh return fewer rows than in ExpertMajor */
  int32_t reserved2;
} moecclSimulateConfig_t;
#define MOECCL_SIMULATE_CONFIG_INIT                                                                                  \
  {                                                                                                                  \
    sizeof(moecclSimulateConfig_t), NULL, NULL, moecclOpDispatch, NULL, 0, 0, 0, moecclFloat32, 0, 0, 0, 0, 0, NULL, \
        1, NULL, 0, NULL, moecclLayoutRows, 0                                                                        \
  }

/* Runs the plans of all ranks on a clock, with contention on shared uplinks, and writes a page: the time of each
 * candidate, bytes per level, the busiest uplinks, the critical path, and the gain over the flat algorithm ("no gain"
 * if there is none). It needs no communicator, moves no data and is deterministic. *needed (may be NULL) gets the full
 * length + 1. All times are simulated: no rank runs. moecclInvalidArgument names the field, the file, and the line or
 * position. moecclUnsupported: no candidate can be simulated; the text gives the reason for each. */
MOECCL_API moecclResult_t moecclSimulate(const moecclSimulateConfig_t* config, char* text, size_t text_bytes,
                                         size_t* needed);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SIMULATE_H_ */
