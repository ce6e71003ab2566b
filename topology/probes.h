// SPDX-License-Identifier: Apache-2.0
// There is one probe for each source, in its own file. All have the same form: they return what this source knows of
// the host as a partial graph, or the reason why it knows nothing. merge() combines the graphs.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "topology/graph.h"

namespace moeccl::topology {

// Where to look. Empty means the usual places. Tests pass other libraries and a copy of /sys.
struct ProbeSources {
  std::string sysfs_root = "/sys", proc_root = "/proc", dev_root = "/dev";
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

// Adds links between GPUs that read each other's memory and have no NVLink. Gpu: driver::CudaGpu or driver::NvmlGpu.
template <class Gpu>
void link_peers(const std::vector<Gpu>& gpus, const char* source, Graph& graph) {
  for (size_t i = 0; i < gpus.size(); ++i)
    for (size_t j = i + 1; j < gpus.size(); ++j) {
      const std::string x = "pci:" + normal_pci(gpus[i].pci), y = "pci:" + normal_pci(gpus[j].pci);
      if (!gpus[i].reads_peer[j] || !gpus[j].reads_peer[i] || x == "pci:" || y == "pci:" || x == y) continue;
      Link link;
      link.a = std::min(x, y);
      link.b = std::max(x, y);
      link.kind = LinkKind::kPeer;
      link.sources = {source};
      const auto is_nvlink = [&](const Link& l) {
        return l.kind == LinkKind::kNvlink && l.a == link.a && l.b == link.b;
      };
      if (std::none_of(graph.links.begin(), graph.links.end(), is_nvlink)) graph.links.push_back(link);
    }
}

}  // namespace moeccl::topology
