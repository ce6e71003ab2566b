// SPDX-License-Identifier: Apache-2.0
#include "topology/text.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "topology/assign.h"
#include "topology/synthetic.h"
#include "topology/tree.h"

namespace moeccl::topology {

namespace {

std::string pci_of(const Node& node) { return node.id.starts_with("pci:") ? node.id.substr(4) : ""; }

// Formats with at most two decimals and without trailing zeros.
std::string decimal(double value) {
  std::string text = format("{:.2f}", value);
  while (text.back() == '0') text.pop_back();
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string port_text(const Port& port) {
  std::string text = format("port {}", port.number);
  if (!port.interface.empty()) text += " " + port.interface;
  if (port.layer != LinkLayer::kUnknown) text += format(" {}", layer_name(port.layer));
  if (port.state != PortState::kUnknown) text += format(" {}", state_name(port.state));
  if (port.gbit > 0) text += format(" {} Gbit/s", decimal(port.gbit));
  if (port.mtu_bytes > 0) text += format(" mtu {}", port.mtu_bytes);
  if (!port.address.empty()) text += " " + port.address;
  if (!port.gid.empty()) text += " gid " + port.gid;
  return text;
}

std::string node_text(const Node& node) {
  std::vector<std::string> facts;
  if (node.n_cores > 0) facts.push_back(format("{} core{}", node.n_cores, node.n_cores == 1 ? "" : "s"));
  if (!node.cpus.empty()) facts.push_back("cpus " + cpus_text(node.cpus));
  if (node.memory_bytes > 0) facts.push_back(bytes_text(node.memory_bytes));
  if (node.uplink.bytes_per_ns > 0)
    facts.push_back((node.kind == NodeKind::kHost ? "network " : "PCIe ") + rate_text(node.uplink.bytes_per_ns));
  if (!node.physical.empty()) facts.push_back("virtual function of " + node.physical);
  for (const Port& port : node.ports) facts.push_back(port_text(port));
  std::string text = label(node);
  if (!node.name.empty() && node.kind != NodeKind::kNic) text += " " + node.name;
  if (node.kind == NodeKind::kNic && !pci_of(node).empty()) text += format(" {}", pci_of(node));
  for (size_t i = 0; i < facts.size(); ++i) text += (i == 0 ? ": " : ", ") + facts[i];
  return text;
}

std::string tree_text(const Graph& graph) {
  std::map<std::string, size_t> depth;
  std::string text;
  for (const Node& node : graph.nodes) {
    const size_t at = node.parent.empty() ? 0 : depth[node.parent] + 1;
    depth[node.id] = at;
    text += std::string(2 * at, ' ') + node_text(node) + "\n";
  }
  return text;
}

// The links of a GPU to switches are summed up: a machine with four switches has 32 of them.
std::string links_text(const Graph& graph) {
  struct Switched {
    size_t n = 0;
    double bytes_per_ns = 0;
  };
  std::map<std::pair<int32_t, std::string>, std::pair<const Node*, Switched>> switched;  // by the GPU's number and id
  size_t n_peers = 0;
  std::string text;
  for (const Link& link : graph.links) {
    n_peers += link.kind == LinkKind::kPeer;
    if (link.kind == LinkKind::kPeer) continue;  // only counted: every pair of a machine may have one
    const Node* a = graph.find(link.a);
    const Node* b = graph.find(link.b);
    if (a->kind == NodeKind::kNvSwitch) std::swap(a, b);
    if (b->kind == NodeKind::kNvSwitch && a->kind == NodeKind::kGpu) {
      auto& [gpu, sum] = switched[{a->number, a->id}];
      gpu = a;
      ++sum.n;
      sum.bytes_per_ns += link.cost.bytes_per_ns;
      continue;
    }
    text += format("  {} {} - {}", link_name(link.kind), label(*a), label(*b));
    if (link.count > 1) text += format(" x{}", link.count);
    if (link.cost.bytes_per_ns > 0) text += format(" {}", rate_text(link.cost.bytes_per_ns));
    text += "\n";
  }
  for (const auto& [key, entry] : switched) {
    const auto& [gpu, sum] = entry;
    text += format("  nvlink {} - {} nvswitch{}", label(*gpu), sum.n, sum.n == 1 ? "" : "es");
    if (sum.bytes_per_ns > 0) text += format(" {}", rate_text(sum.bytes_per_ns));
    text += "\n";
  }
  const size_t n_gpus = graph.of_kind(NodeKind::kGpu).size();
  if (n_peers > 0) text += format("  peer access: {} of {} pairs of gpus\n", n_peers, n_gpus * (n_gpus - 1) / 2);
  return text.empty() ? "" : "links\n" + text;
}

std::string islands_text(const Graph& graph) {
  const auto gpus = graph.of_kind(NodeKind::kGpu);
  std::string text;
  for (const auto& island : nvlink_islands(graph)) {
    if (island.size() < 2) continue;
    text += " ";
    for (size_t i = 0; i < island.size(); ++i) {
      const Node& gpu = *gpus[island[i]];
      text += format("{}{}", i == 0 ? "{" : " ", gpu.number < 0 ? gpu.id : format("{}", gpu.number));
    }
    text += "}";
  }
  return text.empty() ? "" : "nvlink islands of gpus" + text + "\n";
}

std::string assignment_text(const Graph& graph) {
  const NicAssignment a = assign_nics(graph);
  std::string text;
  for (size_t i = 0; i < a.choices.size(); ++i) {
    text += format("  {} ->", label(*a.users[i]));
    for (const uint32_t j : a.choices[i].nics) text += format(" {}", label(*a.nics[j]));
    text += format(" ({}", distance_name(crossing(graph, *a.users[i], *a.nics[a.choices[i].nics[0]]).distance));
    if (a.choices[i].share_bytes_per_ns > 0) text += ", " + rate_text(a.choices[i].share_bytes_per_ns);
    text += ")\n";
  }
  return text.empty() ? "" : "nics\n" + text;
}

std::string levels_text(std::span<const Graph> hosts) {
  const auto tree = level_tree(hosts, 0);
  if (!tree.ok()) return "levels: " + tree.status().message() + "\n";
  std::string text = format("levels for {} ranks\n", tree->n_ranks);
  for (const plan::Level& level : tree->levels) {
    text += format("  {}: {} group{}", level.name, level.n_groups, level.n_groups == 1 ? "" : "s");
    if (level.n_groups < tree->n_ranks) {
      std::vector<size_t> sizes(level.n_groups, 0);
      for (const uint32_t group : level.group_of_rank) ++sizes[group];
      text += " of";
      for (size_t i = 0; i < sizes.size() && i < 16; ++i) text += format("{}{}", i == 0 ? " " : "+", sizes[i]);
      if (sizes.size() > 16) text += "+...";
    }
    if (level.link.bytes_per_ns > 0) text += ", " + rate_text(level.link.bytes_per_ns);
    text += "\n";
  }
  return text;
}

std::string one_host(const Graph& graph) {
  std::string text = tree_text(graph) + links_text(graph) + islands_text(graph) + assignment_text(graph);
  for (const std::string& note : graph.notes) text += "note: " + note + "\n";
  return text;
}

}  // namespace

std::string bytes_text(uint64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return decimal(value) + " " + kUnits[unit];
}

std::string rate_text(double bytes_per_ns) {
  return bytes_per_ns < 0.995 ? decimal(bytes_per_ns * 1e3) + " MB/s" : decimal(bytes_per_ns) + " GB/s";
}

std::string label(const Node& node) {
  const std::string pci = pci_of(node), place = pci.empty() ? node.id : pci;
  switch (node.kind) {
    case NodeKind::kHost:
      return "host";
    case NodeKind::kSocket:
    case NodeKind::kNuma:
      return node.number < 0 ? node.id : format("{} {}", kind_name(node.kind), node.number);
    case NodeKind::kCache:
      return node.number < 0 ? node.id : format("cache L{}", node.number);
    case NodeKind::kRoot:
      return "pci " + node.id;
    case NodeKind::kGpu:
      return node.number < 0 ? "gpu " + place : format("gpu {} {}", node.number, place);
    case NodeKind::kNic:
      for (const std::string& name : node.os_devices)  // verbs' name, if any
        if (std::none_of(node.ports.begin(), node.ports.end(), [&](const Port& p) { return p.interface == name; }))
          return "nic " + name;
      return "nic " + (node.os_devices.empty() ? place : node.os_devices[0]);
    default:
      return format("{} {}", kind_name(node.kind), place);
  }
}

std::string to_text(const Graph& graph) { return one_host(graph) + levels_text({&graph, 1}); }

std::string to_text(std::span<const Graph> hosts) {
  if (hosts.size() == 1) return to_text(hosts[0]);
  std::string text;
  for (size_t i = 0; i < hosts.size();) {
    const std::string page = one_host(hosts[i]);
    size_t n = 1;
    while (i + n < hosts.size() && one_host(hosts[i + n]) == page) ++n;
    text += n == 1 ? format("host {} of {}\n", i, hosts.size())
                   : format("hosts {} to {} of {}\n", i, i + n - 1, hosts.size());
    text += page;
    i += n;
  }
  return text + levels_text(hosts);
}

}  // namespace moeccl::topology
