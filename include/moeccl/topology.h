/* SPDX-License-Identifier: Apache-2.0 */
/* Topology: what machine this is, and whether it is well set up. Conventions: types.h. No communicator is needed, and
 * nothing here is collective. */
#ifndef MOECCL_TOPOLOGY_H_
#define MOECCL_TOPOLOGY_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MOECCL_INT {
  moecclTopologyText = 0,  /* a tree for a person, with links, each GPU's NIC and the levels that planners see */
  moecclTopologyJson = 1,  /* MoECCL's own file, which can be edited and given as `source` */
  moecclTopologySvg = 2,   /* a picture */
  moecclTopologyLevels = 3 /* the levels alone, as a synthetic text: "host:2 island:2 rank:4(bw=0.3TB/s)" */
} moecclTopologyFormat_t;

/* Describes a topology. `source` [text]: NULL or "" finds this host (hwloc, verbs, NVML, sysfs, as far as they are
 * here); else a file, hwloc's XML (lstopo --of xml) or our JSON, or a synthetic text such as "node:2 gpu:8" (as
 * moecclConfig_t.topology; only moecclTopologyLevels and moecclTopologyText). text [text_bytes] gets the description,
 * cut like snprintf's; *needed (may be NULL) its full length + 1. May take some 10 ms. moecclInvalidArgument names
 * the file and line, or the position, of what cannot be read. */
MOECCL_API moecclResult_t moecclTopologyDescribe(const char* source, moecclTopologyFormat_t format, char* text,
                                                 size_t text_bytes, size_t* needed);

/* A page for a person: what was found here, limits and permissions, which transport each pair of n_ranks ranks of this
 * host would use and why not a better one, each problem with its fix. n_ranks 0: one for each GPU, or each core. *n_bad
 * (may be NULL) gets the number of problems. Starts two short-lived child processes to try process_vm_readv, and
 * initializes CUDA where it is present: call it from a program of its own, such as `moeccl doctor`. */
MOECCL_API moecclResult_t moecclDoctor(int n_ranks, char* text, size_t text_bytes, size_t* needed, int* n_bad);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_TOPOLOGY_H_ */
