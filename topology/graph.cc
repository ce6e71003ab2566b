// SPDX-License-Identifier: Apache-2.0
#include "topology/graph.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <unordered_map>

#include "src/base/text.h"

namespace moeccl::topology {

namespace {

bool plausible(const plan::LinkCost& cost) {
  return std::isfinite(cost.alpha_ns) && cost.alpha_ns >= 0 && std::isfinite(cost.bytes_per_ns) &&
         cost.bytes_per_ns >= 0;
}

Status validate_node(const Node& node) {
  if (node.id.empty()) return error(moecclInvalidArgument, "a {} without an id", kind_name(node.kind));
  if (!plausible(node.uplink))
    return error(moecclInvalidArgument, "{}: its uplink's figures are not possible", node.id);
  for (const Port& port : node.ports)
    if (!std::isfinite(port.gbit) || port.gbit < 0)
      return error(moecclInvalidArgument, "{}: port {} has an impossible rate", node.id, port.number);
  return {};
}

}  // namespace

const Node* Graph::find(std::string_view id) const {
  for (const Node& node : nodes)
    if (node.id == id) return &node;
  return nullptr;
}

Node* Graph::find(std::string_view id) {
  for (Node& node : nodes)
    if (node.id == id) return &node;
  return nullptr;
}

std::vector<const Node*> Graph::of_kind(NodeKind kind) const {
  std::vector<const Node*> found;
  for (const Node& node : nodes)
    if (node.kind == kind) found.push_back(&node);
  if (kind == NodeKind::kGpu)
    std::stable_sort(found.begin(), found.end(), [](const Node* a, const Node* b) {
      return a->number != b->number ? a->number < b->number : a->id < b->id;
    });
  return found;
}

Status validate(const Graph& graph) {
  if (graph.nodes.empty() || graph.nodes[0].kind != NodeKind::kHost)
    return error(moecclInvalidArgument, "the first node of a topology is its host");
  if (graph.nodes.size() > kMaxNodes)
    return error(moecclInvalidArgument, "{} nodes: at most {} are possible", graph.nodes.size(), kMaxNodes);
  std::unordered_map<std::string_view, size_t> seen;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    MOECCL_TRY(validate_node(node));
    if (i > 0 && node.kind == NodeKind::kHost)
      return error(moecclInvalidArgument, "{}: a topology has one host, this is the second", node.id);
    if (i > 0 && !seen.contains(node.parent))
      return error(moecclInvalidArgument, "{}: its parent \"{}\" does not stand before it", node.id, node.parent);
    if (i == 0 && !node.parent.empty())
      return error(moecclInvalidArgument, "{}: the host has a parent, \"{}\"", node.id, node.parent);
    if (!seen.emplace(node.id, i).second) return error(moecclInvalidArgument, "{} is there twice", node.id);
  }
  for (const Link& link : graph.links) {
    if (!seen.contains(link.a) || !seen.contains(link.b))
      return error(moecclInvalidArgument, "a {} link joins {} and {}: one of them does not exist", link_name(link.kind),
                   link.a, link.b);
    if (link.a == link.b) return error(moecclInvalidArgument, "a link joins {} with itself", link.a);
    if (!plausible(link.cost))
      return error(moecclInvalidArgument, "the link of {} and {} has impossible figures", link.a, link.b);
  }
  return {};
}

void order_by_containment(Graph& graph) {
  std::unordered_map<std::string_view, std::vector<size_t>> below;
  for (size_t i = 1; i < graph.nodes.size(); ++i) below[graph.nodes[i].parent].push_back(i);
  std::vector<size_t> stack{0}, order;
  while (!stack.empty()) {
    order.push_back(stack.back());
    const std::vector<size_t>& children = below[graph.nodes[stack.back()].id];
    stack.pop_back();
    stack.insert(stack.end(), children.rbegin(), children.rend());
  }
  std::vector<Node> nodes;
  for (const size_t i : order) nodes.push_back(std::move(graph.nodes[i]));
  graph.nodes = std::move(nodes);
}

std::vector<const Node*> path_to_host(const Graph& graph, const Node& node) {
  std::vector<const Node*> path{&node};
  while (!path.back()->parent.empty() && path.size() <= graph.nodes.size()) {
    const Node* up = graph.find(path.back()->parent);
    if (up == nullptr) break;
    path.push_back(up);
  }
  return path;
}

const Node* common_ancestor(const Graph& graph, const Node& a, const Node& b) {
  const std::vector<const Node*> from_a = path_to_host(graph, a), from_b = path_to_host(graph, b);
  for (const Node* node : from_a)
    if (std::find(from_b.begin(), from_b.end(), node) != from_b.end()) return node;
  return nullptr;
}

const Node* enclosing(const Graph& graph, const Node& node, NodeKind kind) {
  for (const Node* at : path_to_host(graph, node))
    if (at->kind == kind) return at;
  return nullptr;
}

std::vector<std::vector<uint32_t>> nvlink_islands(const Graph& graph) {
  std::unordered_map<std::string_view, size_t> place;
  std::vector<size_t> leader;
  for (const Node& node : graph.nodes) {
    place.emplace(node.id, leader.size());
    leader.push_back(leader.size());
  }
  const auto find = [&](size_t i) {
    while (leader[i] != i) i = leader[i] = leader[leader[i]];
    return i;
  };
  // The switches of a host are one fabric, as no driver reports the links between them (DGX-2 has two boards of six).
  const std::vector<const Node*> switches = graph.of_kind(NodeKind::kNvSwitch);
  for (const Node* one : switches) leader[place.at(one->id)] = place.at(switches[0]->id);
  for (const Link& link : graph.links) {
    if (link.kind != LinkKind::kNvlink) continue;
    const auto a = place.find(link.a), b = place.find(link.b);
    if (a == place.end() || b == place.end()) continue;
    const size_t x = find(a->second), y = find(b->second);
    leader[std::max(x, y)] = std::min(x, y);
  }
  std::vector<std::vector<uint32_t>> islands;
  std::unordered_map<size_t, size_t> island_of;
  const std::vector<const Node*> gpus = graph.of_kind(NodeKind::kGpu);
  for (uint32_t g = 0; g < gpus.size(); ++g) {
    const auto [it, fresh] = island_of.emplace(find(place.at(gpus[g]->id)), islands.size());
    if (fresh) islands.emplace_back();
    islands[it->second].push_back(g);
  }
  return islands;
}

const char* kind_name(NodeKind kind) {
  constexpr const char* kNames[] = {"host", "socket", "numa", "cache", "root", "switch", "nvswitch", "gpu", "nic"};
  return kNames[static_cast<size_t>(kind)];
}
const char* link_name(LinkKind kind) {
  constexpr const char* kNames[] = {"nvlink", "sockets", "peer"};
  return kNames[static_cast<size_t>(kind)];
}
const char* layer_name(LinkLayer layer) {
  constexpr const char* kNames[] = {"unknown", "Ethernet", "InfiniBand"};
  return kNames[static_cast<size_t>(layer)];
}
const char* state_name(PortState state) {
  constexpr const char* kNames[] = {"unknown", "down", "up"};
  return kNames[static_cast<size_t>(state)];
}

double nic_bytes_per_ns(const Node& nic) {
  double gbit = 0;
  for (const Port& port : nic.ports)
    if (port.state != PortState::kDown) gbit += port.gbit;
  return gbit / 8;
}

bool nic_usable(const Node& nic) {
  return std::any_of(nic.ports.begin(), nic.ports.end(),
                     [](const Port& port) { return port.state != PortState::kDown; });
}

void leave_out_virtual(std::vector<const Node*>& nics) {
  const std::vector<const Node*> all = nics;
  std::erase_if(nics, [&](const Node* nic) {
    return std::any_of(all.begin(), all.end(), [&](const Node* other) { return other->id == nic->physical; });
  });
}

std::string cpus_text(const Cpus& cpus) {
  std::string text;
  for (size_t i = 0; i < cpus.size();) {
    size_t last = i;
    while (last + 1 < cpus.size() && cpus[last + 1] == cpus[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += last == i ? format("{}", cpus[i]) : format("{}-{}", cpus[i], cpus[last]);
    i = last + 1;
  }
  return text;
}

bool parse_cpus(std::string_view text, Cpus* cpus) {
  cpus->clear();
  const char* at = text.data();
  const char* const end = at + text.size();
  const auto number = [&](uint32_t* value) {
    const auto [next, code] = std::from_chars(at, end, *value);
    if (code != std::errc() || *value >= kMaxCpus) return false;
    at = next;
    return true;
  };
  while (at != end) {
    uint32_t first = 0;
    if (!number(&first)) return false;
    uint32_t last = first;
    if (at != end && *at == '-') {
      ++at;
      if (!number(&last)) return false;
    }
    if (last < first || (!cpus->empty() && first <= cpus->back())) return false;
    for (uint32_t cpu = first; cpu <= last; ++cpu) cpus->push_back(cpu);
    if (at == end) break;
    if (*at != ',' || ++at == end) return false;
  }
  return true;
}

std::string normal_pci(std::string_view text) {
  const auto hex = [](std::string_view digits, uint32_t limit, uint32_t* value) {
    const auto parsed = parse_number(digits, limit, 16);
    *value = parsed.value_or(0);
    return parsed.has_value();
  };
  const size_t dot = text.rfind('.');
  if (dot == std::string_view::npos) return {};
  const size_t device_at = text.rfind(':', dot);
  if (device_at == std::string_view::npos) return {};
  const size_t bus_at = device_at == 0 ? std::string_view::npos : text.rfind(':', device_at - 1);
  uint32_t domain = 0, bus = 0, device = 0, function = 0;
  const std::string_view head = text.substr(0, bus_at == std::string_view::npos ? 0 : bus_at);
  const size_t bus_from = bus_at == std::string_view::npos ? 0 : bus_at + 1;
  if ((bus_at != std::string_view::npos && !hex(head, ~0u, &domain)) ||
      !hex(text.substr(bus_from, device_at - bus_from), 0xff, &bus) ||
      !hex(text.substr(device_at + 1, dot - device_at - 1), 0x1f, &device) || !hex(text.substr(dot + 1), 7, &function))
    return {};
  return format("{:04x}:{:02x}:{:02x}.{:x}", domain, bus, device, function);
}

}  // namespace moeccl::topology
