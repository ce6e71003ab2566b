// SPDX-License-Identifier: Apache-2.0
#include "topology/merge.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

namespace moeccl::topology {

namespace {

bool differs(double a, double b) { return a > 0 && b > 0 && std::abs(a - b) > 0.05 * std::max(a, b); }

// Devices are below switches, switches below roots, roots below processors. Used when two parents are not related.
int depth_of_kind(NodeKind kind) {
  switch (kind) {
    case NodeKind::kHost:
      return 0;
    case NodeKind::kSocket:
      return 1;
    case NodeKind::kNuma:
      return 2;
    case NodeKind::kCache:
      return 3;
    case NodeKind::kRoot:
      return 4;
    case NodeKind::kSwitch:
      return 5;
    default:
      return 6;
  }
}

class Merger {
 public:
  Result<Graph> run(const std::vector<Graph>& parts) {
    Node host;
    host.id = "host";
    nodes_.emplace(host.id, host);
    for (const Graph& part : parts) {
      for (const Node& node : part.nodes) add(node);
      for (const Link& link : part.links) add(link);
      notes_.insert(notes_.end(), part.notes.begin(), part.notes.end());
    }
    if (nodes_.size() > kMaxNodes)
      return error(moecclInvalidArgument, "{} nodes: at most {} are possible", nodes_.size(), kMaxNodes);
    choose_parents();
    break_cycles();
    prune();
    number_gpus();
    count_host();
    Graph graph = ordered();
    MOECCL_TRY(validate(graph));
    return graph;
  }

 private:
  void note(const std::string& text) {
    if (notes_.size() < 64) notes_.push_back(text);
  }

  void add(const Node& node) {
    auto [it, fresh] = nodes_.emplace(node.id, node);
    Node& known = it->second;
    if (!node.parent.empty()) parents_[node.id].push_back(node.parent);
    if (fresh) return;
    if (known.kind != node.kind) {
      note(format("{} is a {} for {} and a {} for {}: the first is used", node.id, kind_name(known.kind), told(known),
                  kind_name(node.kind), told(node)));
      return;
    }
    if (known.name.empty()) known.name = node.name;
    if (known.number < 0) known.number = node.number;
    if (known.cpus.empty()) known.cpus = node.cpus;
    if (known.n_cores == 0) known.n_cores = node.n_cores;
    if (differs(static_cast<double>(known.memory_bytes), static_cast<double>(node.memory_bytes)))
      note(format("{} has {} bytes of memory for {} and {} for {}: the first is used", node.id, known.memory_bytes,
                  told(known), node.memory_bytes, told(node)));
    if (known.memory_bytes == 0) known.memory_bytes = node.memory_bytes;
    // An idle GPU slows its link down, and the PCI tree shows that rate; NVML reports what the link can do.
    const bool better = node.kind == NodeKind::kGpu && told_by_nvml(node) && node.uplink.bytes_per_ns > 0;
    if (known.uplink.bytes_per_ns == 0 || better) known.uplink.bytes_per_ns = node.uplink.bytes_per_ns;
    if (known.uplink.alpha_ns == 0) known.uplink.alpha_ns = node.uplink.alpha_ns;
    if (known.physical.empty()) known.physical = node.physical;
    for (const Port& port : node.ports) add(known, node, port);
    unite(known.os_devices, node.os_devices);
    unite(known.sources, node.sources);
  }

  void add(Node& known, const Node& from, const Port& port) {
    const auto it =
        std::find_if(known.ports.begin(), known.ports.end(), [&](const Port& p) { return p.number == port.number; });
    if (it == known.ports.end()) {
      if (known.ports.size() < kMaxPorts) known.ports.push_back(port);
      return;
    }
    if (differs(it->gbit, port.gbit))
      note(format("{} port {} runs at {} Gbit/s for {} and at {} for {}: the first is used", known.id, port.number,
                  it->gbit, told(known), port.gbit, told(from)));
    if (it->interface.empty()) it->interface = port.interface;
    if (it->layer == LinkLayer::kUnknown) it->layer = port.layer;
    if (it->state == PortState::kUnknown) it->state = port.state;
    if (it->gbit == 0) it->gbit = port.gbit;
    if (it->mtu_bytes == 0) it->mtu_bytes = port.mtu_bytes;
    if (it->gid.empty()) it->gid = port.gid;
    if (it->address.empty()) it->address = port.address;
  }

  void add(Link link) {
    if (link.b < link.a) std::swap(link.a, link.b);
    for (Link& known : links_) {
      if (known.a != link.a || known.b != link.b || known.kind != link.kind) continue;
      if (known.cost.bytes_per_ns == 0) known.cost.bytes_per_ns = link.cost.bytes_per_ns;
      if (known.cost.alpha_ns == 0) known.cost.alpha_ns = link.cost.alpha_ns;
      unite(known.sources, link.sources);
      return;
    }
    links_.push_back(link);
  }

  static void unite(std::vector<std::string>& known, const std::vector<std::string>& more) {
    for (const std::string& one : more)
      if (std::find(known.begin(), known.end(), one) == known.end()) known.push_back(one);
  }
  static bool told_by_nvml(const Node& node) {
    return std::find(node.sources.begin(), node.sources.end(), "nvml") != node.sources.end();
  }
  static std::string told(const Node& node) { return node.sources.empty() ? "one source" : node.sources[0]; }

  bool is_above(const std::string& upper, const std::string& lower) const {
    size_t steps = 0;
    for (auto at = nodes_.find(lower); at != nodes_.end() && steps <= nodes_.size(); ++steps) {
      if (at->first == upper) return true;
      at = nodes_.find(at->second.parent);
    }
    return false;
  }

  // Goes from containers to what they contain, so that the path above a candidate is already settled.
  void choose_parents() {
    std::vector<Node*> in_order;
    for (auto& [id, node] : nodes_) in_order.push_back(&node);
    std::stable_sort(in_order.begin(), in_order.end(),
                     [](const Node* a, const Node* b) { return depth_of_kind(a->kind) < depth_of_kind(b->kind); });
    for (Node* node : in_order) {
      node->parent.clear();
      if (node->id == "host") continue;
      node->kind = node->kind == NodeKind::kHost ? NodeKind::kSwitch : node->kind;
      for (const std::string& candidate : parents_[node->id]) choose(*node, candidate);
      if (node->parent.empty()) node->parent = "host";
    }
  }

  void choose(Node& node, const std::string& candidate) {
    const auto found = nodes_.find(candidate);
    if (found == nodes_.end() || candidate == node.id || candidate == node.parent) return;
    if (node.parent.empty() || is_above(node.parent, candidate)) {
      node.parent = candidate;
      return;
    }
    if (is_above(candidate, node.parent)) return;
    const int now = depth_of_kind(nodes_.at(node.parent).kind), then = depth_of_kind(found->second.kind);
    if (then > now) node.parent = candidate;
    if (then == now) note(format("{} is in {} and in {}: the first is used", node.id, node.parent, candidate));
  }

  void break_cycles() {
    for (auto& [id, node] : nodes_) {
      if (id == "host" || is_above("host", id)) continue;
      note(format("{} contains itself by way of {}: it is hung on the host", id, node.parent));
      node.parent = "host";
    }
  }

  // Removes bridges that lead nowhere or to a single node.
  void prune() {
    std::map<std::string, std::vector<std::string>> children;
    for (const auto& [id, node] : nodes_)
      if (id != "host") children[node.parent].push_back(id);
    std::vector<std::string> down{"host"};  // parents before children
    for (size_t i = 0; i < down.size(); ++i)
      for (const std::string& child : children[down[i]]) down.push_back(child);
    for (size_t i = down.size(); i-- > 1;) {
      const std::string& id = down[i];
      const Node node = nodes_.at(id);
      if (node.kind != NodeKind::kRoot && node.kind != NodeKind::kSwitch) continue;
      const std::vector<std::string> below = children[id];
      if (below.size() > 1) continue;
      std::vector<std::string>& siblings = children[node.parent];
      std::erase(siblings, id);
      for (const std::string& child : below) {
        Node& moved = nodes_.at(child);
        moved.parent = node.parent;
        siblings.push_back(child);
        double& rate = moved.uplink.bytes_per_ns;
        moved.uplink.alpha_ns += node.uplink.alpha_ns;
        if (moved.kind == NodeKind::kGpu && told_by_nvml(moved) && rate > 0)
          continue;  // the port shows the idle link too
        if (node.uplink.bytes_per_ns > 0)
          rate = rate > 0 ? std::min(rate, node.uplink.bytes_per_ns) : node.uplink.bytes_per_ns;
      }
      nodes_.erase(id);
    }
    std::erase_if(links_, [&](const Link& link) { return !nodes_.contains(link.a) || !nodes_.contains(link.b); });
  }

  // NVML numbers GPUs by PCI address; without NVML, this does the same.
  void number_gpus() {
    std::set<int32_t> taken;
    bool good = true;
    for (const auto& [id, node] : nodes_)
      if (node.kind == NodeKind::kGpu) good = node.number >= 0 && taken.insert(node.number).second && good;
    if (good) return;
    int32_t next = 0;
    for (auto& [id, node] : nodes_)
      if (node.kind == NodeKind::kGpu) node.number = next++;
  }

  void count_host() {
    Node& host = nodes_.at("host");
    host.kind = NodeKind::kHost;
    std::set<uint32_t> cpus(host.cpus.begin(), host.cpus.end());
    uint32_t cores = 0;
    for (const auto& [id, node] : nodes_) {
      if (node.kind == NodeKind::kSocket) cores += node.n_cores;
      if (host.cpus.empty() && node.kind != NodeKind::kHost) cpus.insert(node.cpus.begin(), node.cpus.end());
    }
    host.cpus.assign(cpus.begin(), cpus.end());
    if (host.n_cores == 0) host.n_cores = cores;
  }

  Graph ordered() {
    std::map<std::string, std::vector<const Node*>> children;
    for (const auto& [id, node] : nodes_)
      if (id != "host") children[node.parent].push_back(&node);
    for (auto& [id, below] : children)
      std::stable_sort(below.begin(), below.end(), [](const Node* a, const Node* b) {
        if (a->kind != b->kind) return a->kind < b->kind;
        if (a->number != b->number) return a->number < b->number;
        return a->cpus != b->cpus ? a->cpus < b->cpus : a->id < b->id;
      });
    Graph graph;
    std::vector<const Node*> stack{&nodes_.at("host")};
    while (!stack.empty()) {
      const Node* node = stack.back();
      stack.pop_back();
      graph.nodes.push_back(*node);
      std::sort(graph.nodes.back().ports.begin(), graph.nodes.back().ports.end(),
                [](const Port& a, const Port& b) { return a.number < b.number; });
      const std::vector<const Node*>& below = children[node->id];
      for (size_t i = below.size(); i-- > 0;) stack.push_back(below[i]);
    }
    std::sort(links_.begin(), links_.end(), [](const Link& a, const Link& b) {
      if (a.kind != b.kind) return a.kind < b.kind;
      return a.a != b.a ? a.a < b.a : a.b < b.b;
    });
    graph.links = links_;
    graph.notes = notes_;
    return graph;
  }

  std::map<std::string, Node> nodes_;
  std::map<std::string, std::vector<std::string>> parents_;
  std::vector<Link> links_;
  std::vector<std::string> notes_;
};

}  // namespace

Result<Graph> merge(const std::vector<Graph>& parts) { return Merger().run(parts); }

}  // namespace moeccl::topology
