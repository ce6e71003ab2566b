// SPDX-License-Identifier: Apache-2.0
#include "src/routing/routing_paths.h"

#include <algorithm>
#include <numeric>

#include "src/routing/domains.h"

namespace moeccl::algo {

Result<Placement> Placement::make(int64_t n_experts, uint32_t n_ranks, const int32_t* owner) {
  if (n_experts < 1 || n_experts > 65535)
    return error(moecclInvalidArgument, "n_experts is {}: between 1 and 65535 are possible", n_experts);
  Placement p;
  p.n_ranks = n_ranks;
  const uint32_t n = static_cast<uint32_t>(n_experts), share = n / n_ranks, extra = n % n_ranks;
  for (uint32_t e = 0; e < n; ++e) {
    if (!owner) {
      // The first `extra` ranks own share + 1 experts each.
      const uint32_t in_large = extra * (share + 1);
      p.owner.push_back(e < in_large ? e / (share + 1) : extra + (e - in_large) / share);
      continue;
    }
    if (owner[e] < 0 || static_cast<uint32_t>(owner[e]) >= n_ranks)
      return error(moecclInvalidArgument, "expert_rank[{}] is {}: the communicator has ranks 0..{}", e, owner[e],
                   n_ranks - 1);
    p.owner.push_back(static_cast<uint32_t>(owner[e]));
  }
  p.local_first.assign(n_ranks + 1, 0);
  for (const uint32_t r : p.owner) ++p.local_first[r + 1];
  std::partial_sum(p.local_first.begin(), p.local_first.end(), p.local_first.begin());
  p.local.resize(n);
  p.local_index.resize(n);
  std::vector<uint32_t> filled(n_ranks, 0);
  for (uint32_t e = 0; e < n; ++e) {
    const uint32_t r = p.owner[e];
    p.local_index[e] = filled[r]++;
    p.local[p.local_first[r] + p.local_index[e]] = e;
  }
  return p;
}

std::string MoeAlgorithm::name() const {
  return kind == PathKind::kFlat ? "flat" : kind == PathKind::k2dh ? "2dh" : format("hier:{}", dims);
}

std::vector<MoeAlgorithm> moe_candidates(const plan::LevelTree& tree) {
  std::vector<MoeAlgorithm> all;
  for (uint32_t d = 1; d <= tree.depth(); ++d) all.push_back({PathKind::kHier, d});
  all.push_back({PathKind::kFlat, 1});
  if (tree.depth() > 1) all.push_back({PathKind::k2dh, 2});
  return all;
}

Result<MoeAlgorithm> parse_moe_algorithm(std::string_view name, const plan::LevelTree& tree) {
  std::string known;
  for (const MoeAlgorithm& a : moe_candidates(tree)) {
    if (a.name() == name) return a;
    known += ", " + a.name();
  }
  return error(moecclInvalidArgument, "algorithm \"{}\" is not one of: auto{} (the topology has {} level{})",
               std::string(name), known, tree.depth(), tree.depth() == 1 ? "" : "s");
}

uint32_t RankEdges::n_in_before(uint32_t hop) const {
  return static_cast<uint32_t>(std::partition_point(in.begin(), in.end(), [&](const Edge& e) { return e.hop < hop; }) -
                               in.begin());
}
uint32_t RankEdges::first_out_after(uint32_t hop) const {
  return static_cast<uint32_t>(
      std::partition_point(out.begin(), out.end(), [&](const Edge& e) { return e.hop <= hop; }) - out.begin());
}

Paths::Paths(MoeAlgorithm algorithm, const plan::LevelTree& tree, const Placement& placement, const Domains* domains)
    : algorithm_(algorithm), tree_(tree.truncated(algorithm.kind == PathKind::k2dh ? 2 : algorithm.dims)) {
  n_hops_ = tree_.depth();
  const uint32_t n = tree_.n_ranks;
  for (const plan::Level& level : tree_.levels) {
    ranks_.emplace_back(level);
    std::vector<bool>& serves = serves_.emplace_back(level.n_groups, false);
    for (uint32_t r = 0; r < n; ++r)
      if (placement.n_local(r) > 0) serves[level.group_of_rank[r]] = true;
  }
  if (domains != nullptr && !domains->plain()) find_domain_edges(placement, *domains);
  find_degrees();
}

void Paths::find_domain_edges(const Placement& placement, const Domains& domains) {
  const uint32_t n = n_ranks();
  domain_edges_.assign(size_t{n} * n, false);
  domains_hash_ = domains.hash();
  for (uint32_t from = 0; from < n; ++from) {
    for (uint32_t home = 0; home < n; ++home) {
      const uint32_t holder = placement.n_local(home) > 0 ? domains.holder(from, home) : from;
      // Ranks that pass rows on name the same holder, so these are all edges.
      if (holder != from) domain_edges_[size_t{from} * n + next(from, holder)] = true;
    }
  }
}

uint32_t Paths::next(uint32_t holder, uint32_t target) const {
  if (algorithm_.kind == PathKind::k2dh) {
    const std::vector<uint32_t>& node = tree_.levels[0].group_of_rank;
    if (node[holder] == node[target]) return target;
    const uint32_t relay = ranks_[0].counterpart(target, node[holder]);
    return relay == holder ? target : relay;
  }
  const uint32_t level = tree_.level_between(holder, target);
  return ranks_[level].counterpart(holder, tree_.levels[level].group_of_rank[target]);
}

uint32_t Paths::hop(uint32_t from, uint32_t to) const {
  const uint32_t level = tree_.level_between(from, to);
  return algorithm_.kind == PathKind::k2dh ? 1 - level : level;
}

bool Paths::edge(uint32_t from, uint32_t to) const {
  if (from == to) return false;
  if (!domain_edges_.empty()) return domain_edges_[size_t{from} * n_ranks() + to];
  const uint32_t level = tree_.level_between(from, to);
  const uint32_t last = tree_.depth() - 1;
  if (algorithm_.kind == PathKind::k2dh) {
    if (level == last) return serves_[last][to] || relays_[to];
    return serves_[last][to] && ranks_[0].counterpart(to, tree_.levels[0].group_of_rank[from]) == from;
  }
  const uint32_t group = tree_.levels[level].group_of_rank[to];
  return serves_[level][group] && ranks_[level].counterpart(from, group) == to;
}

std::vector<uint32_t> Paths::peers(uint32_t rank, bool incoming) const {
  std::vector<uint32_t> peers;
  for (uint32_t p = 0; p < n_ranks(); ++p)
    if (incoming ? edge(p, rank) : edge(rank, p)) peers.push_back(p);
  // A pair has the same hop both ways.
  std::stable_sort(peers.begin(), peers.end(), [&](uint32_t a, uint32_t b) { return hop(rank, a) < hop(rank, b); });
  return peers;
}

// A holder sends its own rows first, then those of each earlier arrival, in the order of its `in` edges.
void Paths::append_origins(uint32_t from, uint32_t to, std::vector<uint32_t>& origins) const {
  origins.push_back(from);
  const uint32_t h = hop(from, to);
  if (h == 0) return;
  for (const uint32_t before : peers(from, true))
    if (hop(before, from) < h) append_origins(before, from, origins);
}

RankEdges Paths::edges(uint32_t rank) const {
  RankEdges result;
  for (const uint32_t p : peers(rank, true)) {
    const uint32_t h = hop(p, rank);
    uint32_t place = 0;
    for (uint32_t to = 0; to < rank; ++to) place += edge(p, to) && hop(p, to) == h;
    append_origins(p, rank, result.in.emplace_back(Edge{p, h, place, {}}).origins);
  }
  for (const uint32_t p : peers(rank, false)) {
    const uint32_t h = hop(rank, p);
    uint32_t place = 0;
    for (uint32_t from = 0; from < rank; ++from) place += edge(from, p) && hop(from, p) == h;
    result.out.push_back({p, h, place, {}});
  }
  return result;
}

Ways::Ways(const Paths& paths, const Placement& placement, uint32_t from) {
  for (uint32_t x = 0; x < paths.n_ranks(); ++x) {
    for (uint32_t at = from; at != x && placement.n_local(x) > 0;) hop.push_back(at = paths.next(at, x));
    first.push_back(static_cast<uint32_t>(hop.size()));
  }
}

CanonicalOrder::CanonicalOrder(const plan::LevelTree& tree, const Placement& placement) {
  const uint32_t n = placement.n_experts();
  std::vector<uint32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    const uint32_t x = placement.owner[a], y = placement.owner[b];
    const uint32_t level = tree.level_between(x, y);
    if (level == tree.depth()) return a < b;
    return tree.levels[level].group_of_rank[x] < tree.levels[level].group_of_rank[y];
  });
  position.resize(n);
  for (uint32_t i = 0; i < n; ++i) {
    position[order[i]] = i;
    expert.push_back(static_cast<uint16_t>(order[i]));
  }
}

}  // namespace moeccl::algo
