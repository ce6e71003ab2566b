/* SPDX-License-Identifier: Apache-2.0 */
/* Topology: describes this machine and checks whether it is well set up. Conventions: types.h. These calls need no
 * communicator and are not collective. */
#ifndef MOECCL_TOPOLOGY_H_
#define MOECCL_TOPOLOGY_H_

#include <moeccl/types.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum MOECCL_INT {
  moecclTopologyText = 0, /* a tree for a person, with links, each GPU's NIC and the levels that planners see */
  moecclTopologyJson = 1, /* MoECCL's own file, which can be edited and given as `source` */
  moecclTopologySvg = 2,  /* a picture */
  moecclTopologyLevels =
      3 /* the levels alone, as a synthetic text: "host:2 island:2 rank:4(bw=0.3TB/s)"; groups of
         * ranks that are not consecutive are listed, which no `source` can be: "island:2[0,2 1,3]" */
} moecclTopologyFormat_t;

/* Describes a topology. If `source` is NULL, "" or "auto", the call discovers this host with hwloc, verbs, NVML and
 * sysfs, as far as these are present. Otherwise, as in moecclConfig_t.topology, `source` is a synthetic text such as
 * "node:2 gpu:8" (only moecclTopologyLevels and moecclTopologyText), or names a file with such a text, hwloc's XML
 * (lstopo --of xml) or MoECCL's JSON. text[text_bytes] gets the description, truncated as by snprintf; *needed (may be
 * NULL) gets its full length + 1. The call may take some 10 ms. moecclInvalidArgument names the file and line, or the
 * position, of the part that cannot be read. */
MOECCL_API moecclResult_t moecclTopologyDescribe(const char* source, moecclTopologyFormat_t format, char* text,
                                                 size_t text_bytes, size_t* needed);

/* Writes a page for a person: the hardware found, limits and permissions, the transport that each pair of n_ranks ranks
 * of this host would use and why not a better one, and each problem with its fix. n_ranks 0 means one rank per GPU, or
 * per core where there is none. *n_bad (may be NULL) gets the number of problems. The call starts two short-lived child
 * processes to try process_vm_readv, and initializes CUDA if it is present, so make it from a separate program such as
 * `moeccl doctor`. */
MOECCL_API moecclResult_t moecclDoctor(int n_ranks, char* text, size_t text_bytes, size_t* needed, int* n_bad);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_TOPOLOGY_H_ */
