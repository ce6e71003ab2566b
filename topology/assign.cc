// SPDX-License-Identifier: Apache-2.0
#include "topology/assign.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "topology/tree.h"

namespace moeccl::topology {

namespace {

constexpr size_t kMaxSide = 256;  // users and NICs of a host that are considered

// Sends a unit of flow for each user from source through user and NIC to sink, by successive shortest paths.
class Flow {
 public:
  explicit Flow(size_t n_nodes) : first_(n_nodes, kNone) {}

  size_t add(size_t from, size_t to, int64_t cost) {
    edges_.push_back({to, first_[from], 1, cost});
    first_[from] = edges_.size() - 1;
    edges_.push_back({from, first_[to], 0, -cost});
    first_[to] = edges_.size() - 1;
    return edges_.size() - 2;
  }
  // Sends as many units as fit, at the least cost. Returns how many.
  size_t run(size_t source, size_t sink) {
    size_t units = 0;
    while (push_one(source, sink)) ++units;
    return units;
  }
  bool used(size_t edge) const { return edges_[edge].left == 0; }

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Edge {
    size_t to, next;
    int left;
    int64_t cost;
  };

  // Runs Bellman-Ford with a queue, because the costs of used edges are negative.
  bool push_one(size_t source, size_t sink) {
    constexpr int64_t kFar = std::numeric_limits<int64_t>::max();
    std::vector<int64_t> cost(first_.size(), kFar);
    std::vector<size_t> by(first_.size(), kNone), queue{source};
    std::vector<char> waits(first_.size(), 0);
    cost[source] = 0;
    for (size_t i = 0; i < queue.size(); ++i) {
      const size_t at = queue[i];
      waits[at] = 0;
      for (size_t e = first_[at]; e != kNone; e = edges_[e].next) {
        const Edge& edge = edges_[e];
        if (edge.left == 0 || cost[at] + edge.cost >= cost[edge.to]) continue;
        cost[edge.to] = cost[at] + edge.cost;
        by[edge.to] = e;
        if (!waits[edge.to]) queue.push_back(edge.to);
        waits[edge.to] = 1;
      }
    }
    if (cost[sink] == kFar) return false;
    for (size_t at = sink; at != source; at = edges_[by[at] ^ 1].to) {
      --edges_[by[at]].left;
      ++edges_[by[at] ^ 1].left;
    }
    return true;
  }

  std::vector<size_t> first_;
  std::vector<Edge> edges_;
};

constexpr uint32_t kNobody = ~0u;

struct Matching {
  size_t n_matched = 0;
  std::vector<uint32_t> nic_of_user;  // kNobody: none
};

// Gives each user at most one NIC, and NIC j at most capacity[j] users; allowed(i, j) says which pairs are possible.
template <class Allowed>
Matching match(const AssignProblem& p, const std::vector<size_t>& capacity, const Allowed& allowed) {
  const size_t n = p.paths.size(), m = capacity.size();
  const double fastest = *std::max_element(p.nic_bytes_per_ns.begin(), p.nic_bytes_per_ns.end());
  Flow flow(n + m + 2);
  const size_t source = n + m, sink = n + m + 1;
  std::vector<std::vector<size_t>> edges(n, std::vector<size_t>(m, ~size_t{0}));
  for (size_t i = 0; i < n; ++i) {
    flow.add(source, i, 0);
    for (size_t j = 0; j < m; ++j) {
      if (!allowed(i, j)) continue;
      // Distance decides first, then loads (below), then position, which is at most 999.
      const double apart =
          std::abs(static_cast<double>(i) / static_cast<double>(n) - static_cast<double>(j) / static_cast<double>(m));
      const auto order = static_cast<int64_t>(999 * apart);
      edges[i][j] = flow.add(i, n + j, static_cast<int64_t>(p.paths[i][j].distance) * 1'000'000'000'000 + order);
    }
  }
  for (size_t j = 0; j < m; ++j) {
    // The k-th user costs in proportion to 2k-1 over the rate, so that the sum is the square of the load over the rate.
    const double relative = p.nic_bytes_per_ns[j] > 0 ? std::min(fastest / p.nic_bytes_per_ns[j], 1e4) : 1;
    for (size_t k = 0; k < capacity[j]; ++k)
      flow.add(n + j, sink, static_cast<int64_t>(1e5 * relative) * static_cast<int64_t>(2 * k + 1));
  }
  Matching result{flow.run(source, sink), std::vector<uint32_t>(n, kNobody)};
  for (size_t i = 0; i < n; ++i)
    for (size_t j = 0; j < m; ++j)
      if (edges[i][j] != ~size_t{0} && flow.used(edges[i][j])) result.nic_of_user[i] = static_cast<uint32_t>(j);
  return result;
}

// Unknown rates count as the slowest known, or as 1 when none is known; paths without a figure are no limit.
double limit(const Crossing& path) {
  return path.bytes_per_ns > 0 ? path.bytes_per_ns : std::numeric_limits<double>::infinity();
}
AssignProblem with_figures(AssignProblem p) {
  double slowest = 0;
  for (const double rate : p.nic_bytes_per_ns)
    if (rate > 0 && (slowest == 0 || rate < slowest)) slowest = rate;
  for (double& rate : p.nic_bytes_per_ns)
    if (rate <= 0) rate = slowest > 0 ? slowest : 1;
  return p;
}

Matching match_with_share(const AssignProblem& p, double share) {
  std::vector<size_t> capacity;
  for (const double rate : p.nic_bytes_per_ns)
    capacity.push_back(static_cast<size_t>(std::min(static_cast<double>(p.paths.size()), rate / share * (1 + 1e-9))));
  return match(p, capacity, [&](size_t i, size_t j) { return limit(p.paths[i][j]) >= share * (1 - 1e-9); });
}

Matching best(const AssignProblem& p) {
  const size_t n = p.paths.size();
  std::vector<double> shares;
  for (size_t j = 0; j < p.nic_bytes_per_ns.size(); ++j) {
    for (size_t k = 1; k <= n; ++k) shares.push_back(p.nic_bytes_per_ns[j] / static_cast<double>(k));
    for (size_t i = 0; i < n; ++i)
      if (std::isfinite(limit(p.paths[i][j]))) shares.push_back(limit(p.paths[i][j]));
  }
  std::sort(shares.begin(), shares.end());
  shares.erase(std::unique(shares.begin(), shares.end()), shares.end());
  // The smallest share always works; this looks for the largest that does.
  size_t low = 0, high = shares.size();
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    (match_with_share(p, shares[middle]).n_matched == n ? low : high) = middle;
  }
  return match_with_share(p, shares[low]);
}

}  // namespace

const char* distance_name(Distance distance) {
  constexpr const char* kNames[] = {"same PCIe switch", "same PCIe root", "same NUMA domain",
                                    "same socket",      "other socket",   "unknown distance"};
  return kNames[static_cast<size_t>(distance)];
}

bool place_known(const Graph& graph, const Node& device) {
  return graph.of_kind(NodeKind::kSocket).size() < 2 || enclosing(graph, device, NodeKind::kSocket) != nullptr;
}

Crossing crossing(const Graph& graph, const Node& a, const Node& b) {
  Crossing result;
  const Node* meet = common_ancestor(graph, a, b);
  if (meet == nullptr) return result;
  const bool one_socket = graph.of_kind(NodeKind::kSocket).size() < 2;
  switch (meet->kind) {
    case NodeKind::kHost:
      result.distance = one_socket                                       ? Distance::kSocket
                        : place_known(graph, a) && place_known(graph, b) ? Distance::kHost
                                                                         : Distance::kUnknown;
      break;
    case NodeKind::kSocket:
      result.distance = Distance::kSocket;
      break;
    case NodeKind::kNuma:
    case NodeKind::kCache:
      result.distance = Distance::kNuma;
      break;
    case NodeKind::kRoot:
      result.distance = Distance::kRoot;
      break;
    default:
      result.distance = Distance::kSwitch;
  }
  const auto narrow = [&](double rate) {
    if (rate > 0 && (result.bytes_per_ns == 0 || rate < result.bytes_per_ns)) result.bytes_per_ns = rate;
  };
  for (const Node* end : {&a, &b})
    for (const Node* at : path_to_host(graph, *end)) {
      if (at == meet) break;
      narrow(at->uplink.bytes_per_ns);
    }
  if (result.distance == Distance::kHost) {
    const Node* from = enclosing(graph, a, NodeKind::kSocket);
    const Node* to = enclosing(graph, b, NodeKind::kSocket);
    for (const Link& link : graph.links)
      if (from != nullptr && to != nullptr && link.kind == LinkKind::kSockets &&
          ((link.a == from->id && link.b == to->id) || (link.a == to->id && link.b == from->id)))
        narrow(link.cost.bytes_per_ns);
  }
  return result;
}

std::vector<AssignChoice> assign(const AssignProblem& problem) {
  std::vector<AssignChoice> choices(problem.paths.size());
  const size_t n = choices.size(), m = problem.nic_bytes_per_ns.size();
  if (n == 0 || m == 0) return choices;
  const bool known = std::any_of(problem.nic_bytes_per_ns.begin(), problem.nic_bytes_per_ns.end(),
                                 [](double rate) { return rate > 0; });
  const AssignProblem p = with_figures(problem);
  const Matching first = best(p);
  std::vector<size_t> load(m, 0);
  for (const uint32_t j : first.nic_of_user) ++load[j];
  for (size_t i = 0; i < n; ++i) {
    const uint32_t j = first.nic_of_user[i];
    choices[i].nics = {j};
    if (known)
      choices[i].share_bytes_per_ns =
          std::min(p.nic_bytes_per_ns[j] / static_cast<double>(load[j]), limit(p.paths[i][j]));
  }
  // Unused NICs go to users that are no farther from them than from their first NIC, one each, round after round.
  for (bool more = true; more;) {
    std::vector<size_t> spare(m);
    for (size_t j = 0; j < m; ++j) spare[j] = load[j] == 0;
    const Matching extra = match(p, spare, [&](size_t i, size_t j) {
      return spare[j] != 0 && p.paths[i][j].distance <= p.paths[i][choices[i].nics[0]].distance;
    });
    more = extra.n_matched > 0;
    for (size_t i = 0; i < n; ++i) {
      if (extra.nic_of_user[i] == kNobody) continue;
      choices[i].nics.push_back(extra.nic_of_user[i]);
      ++load[extra.nic_of_user[i]];
    }
  }
  return choices;
}

namespace {

AssignProblem problem_of(const Graph& graph, std::span<const Node* const> users, std::span<const Node* const> nics) {
  AssignProblem problem;
  for (const Node* nic : nics) problem.nic_bytes_per_ns.push_back(topology::nic_bytes_per_ns(*nic));
  for (const Node* user : users) {
    problem.paths.emplace_back();
    for (const Node* nic : nics) problem.paths.back().push_back(crossing(graph, *user, *nic));
  }
  return problem;
}

}  // namespace

NicAssignment assign_nics(const Graph& graph) {
  NicAssignment result;
  result.users = graph.of_kind(NodeKind::kGpu);
  if (result.users.empty()) {
    result.users = graph.of_kind(NodeKind::kNuma);
    std::erase_if(result.users, [](const Node* numa) { return numa->cpus.empty() && numa->n_cores == 0; });
  }
  for (const Node* nic : graph.of_kind(NodeKind::kNic))
    if (nic_usable(*nic)) result.nics.push_back(nic);
  std::stable_sort(result.nics.begin(), result.nics.end(), [](const Node* a, const Node* b) { return a->id < b->id; });
  // Interfaces without a device (bridges, tunnels) are used only if there is nothing else.
  if (std::any_of(result.nics.begin(), result.nics.end(), [](const Node* nic) { return nic->id.starts_with("pci:"); }))
    std::erase_if(result.nics, [](const Node* nic) { return !nic->id.starts_with("pci:"); });
  leave_out_virtual(result.nics);
  if (result.users.size() > kMaxSide) result.users.resize(kMaxSide);
  if (result.nics.size() > kMaxSide) result.nics.resize(kMaxSide);
  if (!result.nics.empty()) result.choices = assign(problem_of(graph, result.users, result.nics));
  return result;
}

namespace {

struct Candidates {
  std::vector<const Node*> nics;
  std::vector<uint32_t> positions;  // of their devices
};

// Returns the nodes of these devices, without virtual functions beside their physical device. The result is empty if
// the graph does not know all devices.
Candidates candidates_of(const Graph& graph, std::span<const std::string> devices) {
  std::vector<const Node*> nodes;
  const std::vector<const Node*> known = graph.of_kind(NodeKind::kNic);
  for (const std::string& device : devices) {
    const auto nic = std::find_if(known.begin(), known.end(), [&](const Node* n) {
      return std::find(n->os_devices.begin(), n->os_devices.end(), device) != n->os_devices.end();
    });
    if (nic == known.end()) return {};
    nodes.push_back(*nic);
  }
  Candidates result{nodes, {}};
  leave_out_virtual(result.nics);
  for (uint32_t d = 0; d < nodes.size(); ++d)
    if (std::find(result.nics.begin(), result.nics.end(), nodes[d]) != result.nics.end()) result.positions.push_back(d);
  return result;
}

// Returns the devices of one of the users when all of them use some.
std::vector<uint32_t> share_of(const Graph& graph, std::span<const Node* const> users, size_t user,
                               const Candidates& candidates) {
  std::vector<uint32_t> devices = assign(problem_of(graph, users, candidates.nics))[user].nics;
  for (uint32_t& d : devices) d = candidates.positions[d];
  return devices;
}

}  // namespace

std::vector<uint32_t> devices_of_rank(const Graph& graph, std::span<const std::string> devices, uint32_t rank,
                                      uint32_t n_ranks) {
  std::vector<uint32_t> own(devices.size());
  std::iota(own.begin(), own.end(), 0u);
  const Candidates candidates = candidates_of(graph, devices);
  if (candidates.nics.empty()) return own;
  std::vector<const Node*> users;
  for (const Seat& seat : default_seats(graph, 0, n_ranks)) users.push_back(graph.find(seat.node));
  const bool known = std::find(users.begin(), users.end(), nullptr) == users.end();
  if (!known || rank >= users.size() || users.size() > kMaxSide || candidates.nics.size() > kMaxSide) return own;
  return share_of(graph, users, rank, candidates);
}

std::vector<uint32_t> devices_of_gpu(const Graph& graph, std::span<const std::string> devices, std::string_view pci) {
  const std::string id = "pci:" + normal_pci(pci);
  const Candidates candidates = candidates_of(graph, devices);
  const std::vector<const Node*> gpus = graph.of_kind(NodeKind::kGpu);
  const auto own = std::find_if(gpus.begin(), gpus.end(), [&](const Node* gpu) { return gpu->id == id; });
  if (own == gpus.end() || candidates.nics.empty() || gpus.size() > kMaxSide || candidates.nics.size() > kMaxSide)
    return {};
  return share_of(graph, gpus, static_cast<size_t>(own - gpus.begin()), candidates);
}

bool joined_by_nvlink(const Graph& graph, std::string_view pci, std::string_view other) {
  const std::vector<const Node*> gpus = graph.of_kind(NodeKind::kGpu);
  for (const std::vector<uint32_t>& island : nvlink_islands(graph)) {
    const auto holds = [&](std::string_view address) {
      const std::string id = "pci:" + normal_pci(address);
      return std::any_of(island.begin(), island.end(), [&](uint32_t g) { return gpus[g]->id == id; });
    };
    if (holds(pci)) return holds(other);
  }
  return false;
}

}  // namespace moeccl::topology
