// SPDX-License-Identifier: Apache-2.0
// One probe a source, each in its own file, all alike: what this source knows of the host as a partial graph, or the
// reason why it knows nothing. merge() makes one graph of them.
#pragma once

#include <string>

#include "topology/graph.h"

namespace moeccl::topology {

// Where to look. Empty: the usual places. Tests give other libraries and a copy of /sys.
struct ProbeSources {
  std::string sysfs_root = "/sys";
  std::string hwloc_library, ibv_library, nvml_library, cuda_library;
  bool cuda = false;  // ask the CUDA driver too: see src/driver/cuda_probe.h why not always
};

struct Probe {
  const char* name;
  Result<Graph> (*run)(const ProbeSources&);
  const char* gives;   // for a report
  const char* remedy;  // what to do when it is absent and its hardware is here
};

Result<Graph> probe_hwloc(const ProbeSources& sources);  // sockets, NUMA, caches, PCI tree
Result<Graph> probe_sysfs(const ProbeSources& sources);  // the same without hwloc; interfaces, rates, MTU, addresses
Result<Graph> probe_verbs(const ProbeSources& sources);  // RDMA ports: state, rate, GIDs
Result<Graph> probe_nvml(const ProbeSources& sources);   // GPUs, NVLink, peer access
Result<Graph> probe_cuda(const ProbeSources& sources);   // GPUs and peer access as CUDA sees them

}  // namespace moeccl::topology
