// SPDX-License-Identifier: Apache-2.0
// There is one probe for each source, in its own file. All have the same form: they return what this source knows of
// the host as a partial graph, or the reason why it knows nothing. merge() combines the graphs.
#pragma once

#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

// Where to look. Empty means the usual places. Tests pass other libraries and a copy of /sys.
struct ProbeSources {
  std::string sysfs_root = "/sys";
  std::string hwloc_library, ibv_library, nvml_library, cuda_library;
  bool cuda = false;  // ask the CUDA driver too; src/driver/cuda/probe.h says why this is not the default
};

struct Probe {
  const char* name;
  Result<Graph> (*run)(const ProbeSources&);
  const char* gives;   // for a report
  const char* remedy;  // what to do when the source is absent but its hardware is here
};

Result<Graph> probe_hwloc(const ProbeSources& sources);  // sockets, NUMA, caches, PCI tree
Result<Graph> probe_sysfs(const ProbeSources& sources);  // the same without hwloc; interfaces, rates, MTU, addresses
Result<Graph> probe_verbs(const ProbeSources& sources);  // RDMA ports: state, rate, GIDs
Result<Graph> probe_nvml(const ProbeSources& sources);   // GPUs, NVLink, peer access
Result<Graph> probe_cuda(const ProbeSources& sources);   // GPUs and peer access as CUDA sees them

}  // namespace moeccl::topology
