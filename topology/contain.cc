// SPDX-License-Identifier: Apache-2.0
#include "topology/contain.h"

#include <algorithm>

namespace moeccl::topology {

namespace {

bool holds(const Cpus& outer, const Cpus& inner) {
  return !inner.empty() && std::includes(outer.begin(), outer.end(), inner.begin(), inner.end());
}

// Returns the smallest node of the given kinds that holds `cpus`. Among equal ones, the later kind wins, so that NUMA
// comes before its socket. Returns "host" when there is none.
std::string smallest(const std::vector<Node>& nodes, const Cpus& cpus, bool numa_too) {
  const Node* best = nullptr;
  for (const Node& node : nodes) {
    if (node.kind != NodeKind::kSocket && !(numa_too && node.kind == NodeKind::kNuma)) continue;
    if (!holds(node.cpus, cpus)) continue;
    if (best == nullptr || node.cpus.size() < best->cpus.size() ||
        (node.cpus.size() == best->cpus.size() && node.kind > best->kind))
      best = &node;
  }
  return best == nullptr ? "host" : best->id;
}

}  // namespace

bool is_gpu(uint32_t device_class, uint32_t vendor) {
  const bool display = device_class == 0x0300 || device_class == 0x0302 || device_class == 0x0380;
  const bool accelerator = device_class == 0x1200;
  return (display || accelerator) && (vendor == kNvidia || vendor == kAmd);
}

void contain(std::vector<Node>& nodes, const std::vector<uint32_t>& core_cpus, const Attachments& attach) {
  for (Node& node : nodes) {
    switch (node.kind) {
      case NodeKind::kHost:  // virtual machines may have no sockets to count
        node.n_cores = static_cast<uint32_t>(core_cpus.size());
        continue;
      case NodeKind::kSocket:
        node.parent = "host";
        break;
      case NodeKind::kNuma:
        node.parent = smallest(nodes, node.cpus, false);
        break;
      case NodeKind::kCache:
        node.parent = smallest(nodes, node.cpus, true);
        break;
      default:
        if (const auto it = attach.find(node.id); it != attach.end()) node.parent = smallest(nodes, it->second, true);
        continue;
    }
    if (node.kind == NodeKind::kCache) continue;
    node.n_cores = static_cast<uint32_t>(std::count_if(core_cpus.begin(), core_cpus.end(), [&](uint32_t cpu) {
      return std::binary_search(node.cpus.begin(), node.cpus.end(), cpu);
    }));
  }
}

}  // namespace moeccl::topology
