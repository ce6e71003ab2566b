// SPDX-License-Identifier: Apache-2.0
#include "topology/tree.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "topology/assign.h"

namespace moeccl::topology {

namespace {

using plan::kMaxRanks;
using plan::Level;
using plan::LevelTree;
using plan::LinkCost;

using Partition = std::vector<uint32_t>;  // group of each rank; groups are numbered in order of their first rank

// Groups ranks by any key.
template <class Key>
Partition partition(const std::vector<Key>& keys) {
  std::map<Key, uint32_t> seen;
  Partition groups;
  for (const Key& key : keys) groups.push_back(seen.emplace(key, static_cast<uint32_t>(seen.size())).first->second);
  return groups;
}
uint32_t n_groups(const Partition& p) { return p.empty() ? 0 : *std::max_element(p.begin(), p.end()) + 1; }

// Returns the finest partition that is coarser than both.
Partition join(const Partition& a, const Partition& b) {
  std::vector<uint32_t> leader(n_groups(a));
  std::iota(leader.begin(), leader.end(), 0);
  const auto find = [&](uint32_t i) {
    while (leader[i] != i) i = leader[i] = leader[leader[i]];
    return i;
  };
  std::vector<uint32_t> first(n_groups(b), ~0u);  // a group of a that meets this group of b
  for (size_t r = 0; r < a.size(); ++r) {
    if (first[b[r]] == ~0u) first[b[r]] = a[r];
    const uint32_t x = find(a[r]), y = find(first[b[r]]);
    leader[std::max(x, y)] = std::min(x, y);
  }
  std::vector<uint32_t> keys;
  for (const uint32_t group : a) keys.push_back(find(group));
  return partition(keys);
}

void slower(LinkCost& link, const LinkCost& other) {
  if (other.bytes_per_ns > 0 && (link.bytes_per_ns == 0 || other.bytes_per_ns < link.bytes_per_ns))
    link.bytes_per_ns = other.bytes_per_ns;
  link.alpha_ns = std::max(link.alpha_ns, other.alpha_ns);
}

// What one host says about its seats, by node id.
class HostView {
 public:
  explicit HostView(const Graph& graph) : graph_(graph) {
    const std::vector<const Node*> gpus = graph.of_kind(NodeKind::kGpu);
    const auto islands = nvlink_islands(graph);
    for (size_t i = 0; i < islands.size(); ++i)
      for (const uint32_t g : islands[i])
        if (islands[i].size() > 1) island_[gpus[g]->id] = format("nvlink {}", i);
    for (const Link& link : graph.links)
      if (link.kind == LinkKind::kNvlink)
        for (const std::string* end : {&link.a, &link.b}) nvlink_[*end] += link.cost.bytes_per_ns;
  }

  // These return "" when the seat is in no such node.
  std::string socket(const Node& seat) const { return id_of(enclosing(graph_, seat, NodeKind::kSocket)); }
  std::string numa(const Node& seat) const { return id_of(enclosing(graph_, seat, NodeKind::kNuma)); }
  // Returns the NVLink island, else the nearest PCIe switch, else the cache; "" when the seat is alone.
  std::string island(const Node& seat) const {
    if (const auto it = island_.find(seat.id); it != island_.end()) return it->second;
    if (seat.kind == NodeKind::kCache) return seat.id;
    return id_of(enclosing(graph_, seat, NodeKind::kSwitch));
  }

  LinkCost rank_link(const Node& seat) const {
    if (seat.kind != NodeKind::kGpu) return {};
    if (const auto it = nvlink_.find(seat.id); it != nvlink_.end() && it->second > 0) return {0, it->second};
    return seat.uplink;
  }
  LinkCost island_link(const Node& seat) const {
    const Node* above = enclosing(graph_, seat, NodeKind::kSwitch);
    return above == nullptr || island_.contains(seat.id) ? LinkCost{} : above->uplink;
  }
  LinkCost socket_link() const {
    LinkCost cost;
    for (const Link& link : graph_.links)
      if (link.kind == LinkKind::kSockets) slower(cost, link.cost);
    return cost;
  }
  LinkCost host_link() const {
    LinkCost cost = graph_.nodes[0].uplink;
    if (cost.bytes_per_ns > 0) return cost;
    for (const Node* nic : assign_nics(graph_).nics) cost.bytes_per_ns += nic_bytes_per_ns(*nic);
    return cost;
  }

 private:
  static std::string id_of(const Node* node) { return node == nullptr ? "" : node->id; }

  const Graph& graph_;
  std::map<std::string, std::string> island_;
  std::map<std::string, double> nvlink_;  // of a GPU: the sum of all its links, GB/s
};

struct Named {
  const char* name;
  Partition groups;
  LinkCost link;
};

// Keeps one of the levels that divide the ranks alike, and drops one that divides nothing or goes down to the ranks.
std::vector<Named> different(std::vector<Named> levels, uint32_t n_ranks) {
  // The weight decides between two alike levels: an island tells more than a socket, and a host more than everything.
  const auto weight = [](const Named& level) {
    const std::string_view name = level.name;
    return name == "host" ? 3 : name == "island" ? 2 : name == "socket" ? 1 : 0;  // numa, cache: 0
  };
  std::vector<Named> kept;
  for (Named& level : levels) {
    const uint32_t n = n_groups(level.groups);
    if (n <= 1 || (n == n_ranks && std::string_view(level.name) != "host")) continue;
    if (!kept.empty() && kept.back().groups == level.groups) {
      if (weight(level) > weight(kept.back())) kept.back() = std::move(level);
      continue;
    }
    kept.push_back(std::move(level));
  }
  // When each host has one rank, the ranks' level is that of the hosts.
  if (!kept.empty() && n_groups(kept.back().groups) == n_ranks) kept.pop_back();
  return kept;
}

// What the hosts say about the ranks' seats.
struct Answers {
  std::vector<uint32_t> host;                                          // [n_ranks], as the next three
  std::vector<std::pair<uint32_t, std::string>> socket, numa, island;  // within the host
  LinkCost rank_link, island_link, socket_link, host_link;             // the slowest of each kind
};

Result<Answers> answers_of(std::span<const Graph> hosts, std::span<const Seat> seats) {
  std::vector<HostView> views;
  for (const Graph& host : hosts) {
    MOECCL_TRY(validate(host));
    views.emplace_back(host);
  }
  Answers all;
  std::vector<char> seen_host(hosts.size(), 0);
  // Ranks of one seat share its answers.
  struct Answer {
    std::string socket, numa, island;
  };
  std::map<std::pair<uint32_t, std::string>, Answer> of_seat;
  for (uint32_t r = 0; r < seats.size(); ++r) {
    const Seat& seat = seats[r];
    const Node* node = seat.host < hosts.size() ? hosts[seat.host].find(seat.node) : nullptr;
    if (node == nullptr)
      return error(moecclInvalidArgument, "rank {} sits on {} of host {}, which does not exist", r, seat.node,
                   seat.host);
    const HostView& view = views[seat.host];
    auto [it, fresh] = of_seat.try_emplace({seat.host, seat.node});
    if (fresh) {
      it->second = {view.socket(*node), view.numa(*node), view.island(*node)};
      slower(all.rank_link, view.rank_link(*node));
      slower(all.island_link, view.island_link(*node));
    }
    if (!seen_host[seat.host]) {
      seen_host[seat.host] = 1;
      slower(all.socket_link, view.socket_link());
      slower(all.host_link, view.host_link());
    }
    const Answer& a = it->second;
    all.host.push_back(seat.host);
    all.socket.emplace_back(seat.host, a.socket);
    all.numa.emplace_back(seat.host, a.numa.empty() ? a.socket : a.numa);
    all.island.emplace_back(seat.host, a.island.empty() ? format("rank {}", r) : a.island);
  }
  return all;
}

}  // namespace

std::vector<Seat> default_seats(const Graph& graph, uint32_t host, uint32_t n_ranks) {
  std::vector<const Node*> places = graph.of_kind(NodeKind::kGpu);
  std::vector<Seat> seats;
  if (!places.empty()) {
    const auto n_gpus = static_cast<uint32_t>(places.size());
    const uint32_t n = n_ranks == 0 ? n_gpus : n_ranks;
    for (uint32_t r = 0; r < n; ++r)
      seats.push_back({host, places[n <= n_gpus ? r : static_cast<size_t>(uint64_t{r} * n_gpus / n)]->id});
    return seats;
  }
  // Finds the innermost place of each processor that has one: cache, NUMA domain or socket.
  const Node& root = graph.nodes[0];
  const uint32_t n = n_ranks != 0 ? n_ranks : std::max(1u, root.n_cores);
  std::map<uint32_t, const Node*> place_of;
  for (const NodeKind kind : {NodeKind::kSocket, NodeKind::kNuma, NodeKind::kCache})
    for (const Node* node : graph.of_kind(kind))
      for (const uint32_t cpu : node->cpus) place_of[cpu] = node;
  // Assigns blocks of ranks to processors in place order, so that neighbours are near: their numbers may interleave.
  std::vector<const Node*> order;
  for (const Node& node : graph.nodes)
    for (const uint32_t cpu : node.cpus)
      if (const auto it = place_of.find(cpu); it != place_of.end() && it->second == &node) order.push_back(&node);
  for (uint32_t r = 0; r < n; ++r)
    seats.push_back({host, order.empty() ? root.id : order[static_cast<size_t>(uint64_t{r} * order.size() / n)]->id});
  return seats;
}

Result<LevelTree> level_tree(std::span<const Graph> hosts, std::span<const Seat> seats) {
  if (seats.empty() || seats.size() > kMaxRanks)
    return error(moecclInvalidArgument, "a topology of {} ranks: between 1 and {} are possible", seats.size(),
                 kMaxRanks);
  MOECCL_ASSIGN_OR_RETURN(const Answers answers, answers_of(hosts, seats));
  const Partition hosts_of_ranks = partition(answers.host), islands = partition(answers.island);
  const Partition numas = join(partition(answers.numa), islands), sockets = join(partition(answers.socket), numas);
  const auto n_ranks = static_cast<uint32_t>(seats.size());
  const bool gpus = std::any_of(seats.begin(), seats.end(), [&](const Seat& seat) {
    return hosts[seat.host].find(seat.node)->kind == NodeKind::kGpu;
  });
  LevelTree tree;
  tree.n_ranks = n_ranks;
  for (Named& level : different({{"host", hosts_of_ranks, answers.host_link},
                                 {"socket", sockets, answers.socket_link},
                                 {"numa", numas, answers.socket_link},
                                 {gpus ? "island" : "cache", islands, answers.island_link}},
                                n_ranks))
    tree.levels.push_back({level.name, level.link, level.groups, n_groups(level.groups)});
  LevelTree flat = LevelTree::flat(n_ranks);
  const bool hosts_alone = n_groups(hosts_of_ranks) == n_ranks;  // the ranks' links are those of their hosts
  flat.levels[0].link = hosts_alone && n_ranks > 1 ? answers.host_link : answers.rank_link;
  tree.levels.push_back(flat.levels[0]);
  MOECCL_TRY(tree.validate());
  return tree;
}

Result<LevelTree> level_tree(std::span<const Graph> hosts, uint32_t n_ranks) {
  std::vector<Seat> seats;
  for (uint32_t h = 0; h < hosts.size(); ++h) {
    MOECCL_TRY(validate(hosts[h]));
    const bool alone = hosts.size() == 1;
    for (Seat& seat : default_seats(hosts[h], h, alone ? n_ranks : 0)) seats.push_back(std::move(seat));
    if (seats.size() > kMaxRanks) break;  // level_tree() says so
  }
  if (n_ranks != 0 && seats.size() != n_ranks && seats.size() <= kMaxRanks)
    return error(moecclInvalidArgument, "the topology's hosts have {} places for ranks, the communicator has {} ranks",
                 seats.size(), n_ranks);
  return level_tree(hosts, seats);
}

Result<LevelTree> over_hosts(std::span<const LevelTree> hosts, std::span<const uint32_t> host_of) {
  std::vector<uint32_t> position(host_of.size()), n_ranks(hosts.size(), 0);  // of a rank on its host; of a host
  for (size_t r = 0; r < host_of.size(); ++r) position[r] = n_ranks[host_of[r]]++;
  for (size_t h = 0; h < hosts.size(); ++h) {
    MOECCL_TRY(hosts[h].validate());
    if (hosts[h].n_ranks != n_ranks[h])
      return error(moecclInvalidArgument, "the levels of host {} are of {} ranks, it has {}", h, hosts[h].n_ranks,
                   n_ranks[h]);
  }
  if (hosts.size() == 1) return hosts[0];
  const auto same_name = [](const Level& a, const Level& b) { return a.name == b.name; };
  const bool alike = std::all_of(hosts.begin(), hosts.end(), [&](const LevelTree& host) {
    return std::ranges::equal(host.levels, hosts[0].levels, same_name);
  });
  LevelTree tree{static_cast<uint32_t>(host_of.size()), {}};
  tree.levels.push_back({"host", {}, {host_of.begin(), host_of.end()}, static_cast<uint32_t>(hosts.size())});
  for (uint32_t l = 0; alike && l < hosts[0].depth(); ++l) {
    Level level{hosts[0].levels[l].name, {}, {}, 0};
    std::vector<std::pair<uint32_t, uint32_t>> groups;
    for (size_t r = 0; r < host_of.size(); ++r)
      groups.emplace_back(host_of[r], hosts[host_of[r]].levels[l].group_of_rank[position[r]]);
    for (const LevelTree& host : hosts) slower(level.link, host.levels[l].link);
    level.group_of_rank = partition(groups);
    level.n_groups = n_groups(level.group_of_rank);
    tree.levels.push_back(std::move(level));
  }
  if (!alike) tree.levels.push_back(LevelTree::flat(tree.n_ranks).levels[0]);
  MOECCL_TRY(tree.validate());
  return tree;
}

}  // namespace moeccl::topology
