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
  link_peers(report.gpus, "cuda", graph);
  return graph;
}

}  // namespace moeccl::topology
