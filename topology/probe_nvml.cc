// SPDX-License-Identifier: Apache-2.0
#include <map>

#include "src/driver/nvml.h"
#include "topology/probes.h"

namespace moeccl::topology {

namespace {

// Returns GB/s each way, for 2.5, 5, 8, 16, 32 or 64 GT/s a lane.
double pcie_rate(uint32_t generation, uint32_t lanes) {
  if (generation < 1 || generation > 7 || lanes == 0 || lanes > 32) return 0;
  const double gt = generation <= 2 ? 2.5 * generation : static_cast<double>(1u << generation);
  return gt * lanes / 8 * (generation <= 2 ? 0.8 : 128.0 / 130.0);
}

std::string remote_id(const driver::NvmlLink& link) {
  const std::string pci = normal_pci(link.remote_pci);
  if (!pci.empty()) return "pci:" + pci;
  // Switches of another chassis (NVL72) have no address here; together they count as one fabric.
  return link.remote == driver::NvmlLink::Remote::kSwitch ? "nvswitch" : "";
}

}  // namespace

Result<Graph> probe_nvml(const ProbeSources& sources) {
  MOECCL_ASSIGN_OR_RETURN(const driver::NvmlReport report, driver::ask_nvml(sources.nvml_library));
  if (report.gpus.empty()) return error(moecclUnsupported, "NVML is here and finds no GPU");
  Graph graph;
  std::map<std::pair<std::string, std::string>, Link> links;
  for (const driver::NvmlGpu& gpu : report.gpus) {
    const std::string pci = normal_pci(gpu.pci);
    if (pci.empty()) {
      graph.notes.push_back(format("NVML's GPU {} has no PCI address (\"{}\"): left out", gpu.index, gpu.pci));
      continue;
    }
    Node node;
    node.kind = NodeKind::kGpu;
    node.id = "pci:" + pci;
    node.name = gpu.name;
    node.number = static_cast<int32_t>(gpu.index);
    node.memory_bytes = gpu.memory_bytes;
    node.uplink.bytes_per_ns = pcie_rate(gpu.pcie_generation, gpu.pcie_lanes);
    node.os_devices = {format("nvml{}", gpu.index)};
    node.sources = {"nvml"};
    for (const driver::NvmlLink& link : gpu.links) {
      const std::string other = remote_id(link);
      if (other.empty() || other == node.id || link.remote == driver::NvmlLink::Remote::kCpu) continue;
      if (link.remote == driver::NvmlLink::Remote::kSwitch && graph.find(other) == nullptr) {
        Node fabric;
        fabric.kind = NodeKind::kNvSwitch;
        fabric.id = other;
        fabric.sources = {"nvml"};
        graph.nodes.push_back(fabric);
      }
      // Both ends report a link between two GPUs; the end with the lower id counts.
      if (link.remote != driver::NvmlLink::Remote::kSwitch && other < node.id) continue;
      Link& sum = links[{std::min(node.id, other), std::max(node.id, other)}];
      sum.count = sum.a.empty() ? 1 : sum.count + 1;
      sum.a = std::min(node.id, other);
      sum.b = std::max(node.id, other);
      sum.kind = LinkKind::kNvlink;
      sum.cost.bytes_per_ns += link.bytes_per_ns;
      sum.sources = {"nvml"};
    }
    graph.nodes.push_back(node);
  }
  for (const auto& [ends, link] : links)
    if (graph.find(link.a) != nullptr && graph.find(link.b) != nullptr) graph.links.push_back(link);
  link_peers(report.gpus, "nvml", graph);
  return graph;
}

}  // namespace moeccl::topology
