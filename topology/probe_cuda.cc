// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/probe.h"
#include "topology/probes.h"

namespace moeccl::topology {

Result<Graph> probe_cuda(const ProbeSources& sources) {
  if (!sources.cuda)
    return error(moecclUnsupported,
                 "not asked: cuInit leaves state that forked children cannot use (NVML answers instead)");
  MOECCL_ASSIGN_OR_RETURN(const driver::CudaReport report, driver::ask_cuda(sources.cuda_library));
  if (report.gpus.empty()) return error(moecclUnsupported, "CUDA is here and finds no GPU");
  Graph graph;
  for (size_t i = 0; i < report.gpus.size(); ++i) {
    const driver::CudaGpu& gpu = report.gpus[i];
    const std::string pci = normal_pci(gpu.pci);
    if (pci.empty()) continue;
    Node node;
    node.kind = NodeKind::kGpu;
    node.id = "pci:" + pci;
    node.name = gpu.name;
    node.memory_bytes = gpu.memory_bytes;
    node.os_devices = {format("cuda{}", i)};
    node.sources = {"cuda"};
    graph.nodes.push_back(node);
    if (gpu.mps) graph.notes.push_back(format("CUDA shares cuda{} between processes through MPS", i));
  }
  for (size_t a = 0; a < report.gpus.size(); ++a)
    for (size_t b = a + 1; b < report.gpus.size(); ++b) {
      const std::string x = "pci:" + normal_pci(report.gpus[a].pci), y = "pci:" + normal_pci(report.gpus[b].pci);
      if (!report.gpus[a].reads_peer[b] || !report.gpus[b].reads_peer[a] || x == "pci:" || y == "pci:" || x == y)
        continue;
      Link link;
      link.a = std::min(x, y);
      link.b = std::max(x, y);
      link.kind = LinkKind::kPeer;
      link.sources = {"cuda"};
      graph.links.push_back(link);
    }
  return graph;
}

}  // namespace moeccl::topology
