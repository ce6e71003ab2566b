// SPDX-License-Identifier: Apache-2.0
#include "src/routing/moe_traffic.h"

#include <algorithm>
#include <numeric>

#include "src/routing/domains.h"

namespace moeccl::algo {

namespace {

constexpr uint32_t kMaxTopK = 64;

// The row lists that an origin's rows use on their way to every target with experts.
class ListsByTarget {
 public:
  ListsByTarget(const Paths& paths, const Traffic& traffic) : paths_(paths), t_(traffic), stride_(paths.n_hops() + 1) {
    lists_.resize(size_t{paths.n_ranks()} * stride_);
    length_.resize(paths.n_ranks());
  }
  // `placement` is the one that the origin sees.
  void from(uint32_t origin, const Placement& placement) {
    for (uint32_t x = 0; x < paths_.n_ranks(); ++x) {
      length_[x] = 0;
      if (placement.n_local(x) == 0) continue;
      uint64_t* lists = &lists_[size_t{x} * stride_];
      uint32_t source = 0, at = origin;
      while (at != x) {
        const TrafficEdge& edge = edge_between(at, paths_.next(at, x));
        lists[length_[x]++] = edge.first_list + source;
        source = 1 + edge.in_place;
        at = edge.to;
      }
      lists[length_[x]] = t_.scatter_list(x) + source;
    }
  }
  // Returns the lists hop by hop.
  std::span<const uint64_t> to(uint32_t target) const { return {&lists_[size_t{target} * stride_], length_[target]}; }
  // Returns the list into the target's Output.
  uint64_t scatter(uint32_t target) const { return lists_[size_t{target} * stride_ + length_[target]]; }

 private:
  const TrafficEdge& edge_between(uint32_t from, uint32_t to) const {
    const std::pair key(paths_.hop(from, to), to);
    return *std::lower_bound(
        t_.edges.begin() + t_.out_first[from], t_.edges.begin() + t_.out_first[from + 1], key,
        [](const TrafficEdge& e, const auto& k) { return std::pair<uint32_t, uint32_t>(e.hop, e.to) < k; });
  }

  const Paths& paths_;
  const Traffic& t_;
  uint32_t stride_;
  std::vector<uint64_t> lists_;
  std::vector<uint32_t> length_;
};

class Counter {
 public:
  Counter(const Paths& paths, const RoutedLayer& layer, Traffic& t)
      : dedup_(paths.algorithm().dedup()),
        layer_(layer),
        placement_(layer.placement),
        order_(layer.tree, layer.placement),
        ways_(paths, t),
        t_(t) {
    t.rows.assign(t.first_list.back(), 0);
    if (!dedup_ && !layer.expert_major) t.returned.assign(t.rows.size(), 0);
  }
  void count() {
    const GlobalRouting& routing = layer_.routing;
    for (uint32_t origin = 0; origin < t_.n_ranks; ++origin) {
      if (layer_.domains != nullptr) {
        placement_ = layer_.domains->seen_from(origin, layer_.placement);
        order_ = CanonicalOrder(layer_.tree, placement_);
      }
      ways_.from(origin, placement_);
      t_.owns.push_back(placement_.n_local(origin) > 0);
      t_.tokens.push_back(routing.first_token[origin + 1] - routing.first_token[origin]);
      for (uint64_t t = routing.first_token[origin]; t < routing.first_token[origin + 1]; ++t)
        token({routing.expert.data() + t * routing.top_k, routing.top_k});
    }
  }

 private:
  // Choices are in canonical order, so a row that already travels is on the way of the previous choice (Eq. 7).
  void token(std::span<const int32_t> choices) {
    uint32_t position[kMaxTopK], n = 0;
    for (const int32_t e : choices) {
      if (e < 0) continue;
      const uint32_t p = order_.position[static_cast<uint32_t>(e)];
      uint32_t i = n++;
      for (; i > 0 && position[i - 1] > p; --i) position[i] = position[i - 1];
      position[i] = p;
    }
    std::span<const uint64_t> before;
    uint32_t owner_before = ~0u;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t owner = placement_.owner[order_.expert[position[i]]];
      const std::span<const uint64_t> way = ways_.to(owner);
      // In layout Rows, a rank's experts share one row, and only that one returns.
      const bool kept = layer_.expert_major || owner != owner_before;
      owner_before = owner;
      size_t shared = 0;
      while (dedup_ && shared < way.size() && shared < before.size() && way[shared] == before[shared]) ++shared;
      for (size_t h = shared; h < way.size(); ++h) move(way[h], kept);
      if (kept) move(ways_.scatter(owner), kept);
      before = way;
    }
  }
  void move(uint64_t list, bool kept) {
    ++t_.rows[list];
    if (kept && !t_.returned.empty()) ++t_.returned[list];
  }

  bool dedup_;
  const RoutedLayer& layer_;
  Placement placement_;  // as the current origin sees it
  CanonicalOrder order_;
  ListsByTarget ways_;
  Traffic& t_;
};

void index_edges(Traffic& traffic) {
  const uint32_t n = traffic.n_ranks;
  traffic.in_first.assign(n + 1, 0);
  for (const TrafficEdge& e : traffic.edges) ++traffic.in_first[e.to + 1];
  std::partial_sum(traffic.in_first.begin(), traffic.in_first.end(), traffic.in_first.begin());
  traffic.in.resize(traffic.edges.size());
  std::vector<uint32_t> filled(n, 0);
  // Edges are sorted by sender, so each receiver's edges are ascending within a hop.
  for (uint32_t hop = 0; hop < traffic.n_hops; ++hop) {
    for (uint32_t e = 0; e < traffic.edges.size(); ++e) {
      TrafficEdge& edge = traffic.edges[e];
      if (edge.hop != hop) continue;
      edge.in_place = filled[edge.to]++;
      traffic.in[traffic.in_first[edge.to] + edge.in_place] = e;
    }
  }
}

// Assigns a list to every source of an out edge, and one to every source of Output.
void number_lists(Traffic& traffic) {
  uint64_t n_lists = 0;
  for (uint32_t r = 0; r < traffic.n_ranks; ++r) {
    traffic.first_list.push_back(n_lists);
    const std::span<const uint32_t> in = traffic.in_of(r);
    for (uint32_t e = traffic.out_first[r]; e < traffic.out_first[r + 1]; ++e) {
      TrafficEdge& edge = traffic.edges[e];
      edge.first_list = n_lists;
      n_lists +=
          1 + static_cast<uint64_t>(std::partition_point(in.begin(), in.end(),
                                                         [&](uint32_t i) { return traffic.edges[i].hop < edge.hop; }) -
                                    in.begin());
    }
    n_lists += 1 + in.size();
  }
  traffic.first_list.push_back(n_lists);
}

// The lists of an edge are followed by those of the next edge.
void sum_lists(Traffic& traffic) {
  for (uint32_t r = 0; r < traffic.n_ranks; ++r) {
    for (uint32_t e = traffic.out_first[r]; e < traffic.out_first[r + 1]; ++e) {
      TrafficEdge& edge = traffic.edges[e];
      const uint64_t end = e + 1 < traffic.out_first[r + 1] ? traffic.edges[e + 1].first_list : traffic.scatter_list(r);
      edge.rows = std::accumulate(traffic.rows.begin() + static_cast<ptrdiff_t>(edge.first_list),
                                  traffic.rows.begin() + static_cast<ptrdiff_t>(end), uint64_t{0});
      traffic.level_rows[edge.level] += edge.rows;
    }
  }
}

}  // namespace

Status check_routing(const GlobalRouting& routing, uint32_t n_experts) {
  if (routing.top_k < 1 || routing.top_k > kMaxTopK)
    return error(moecclInvalidArgument, "top_k is {}: give 1 to {}", routing.top_k, kMaxTopK);
  std::vector<uint64_t> seen(n_experts, ~uint64_t{0});
  for (uint64_t t = 0; t < routing.n_tokens(); ++t) {
    for (uint32_t k = 0; k < routing.top_k; ++k) {
      const int32_t e = routing.expert[t * routing.top_k + k];
      if (e < -1 || e >= static_cast<int32_t>(n_experts))
        return error(moecclInvalidArgument, "token {} chooses expert {}: there are 0..{}, and -1 means none", t, e,
                     n_experts - 1);
      if (e >= 0 && std::exchange(seen[static_cast<size_t>(e)], t) == t)
        return error(moecclInvalidArgument, "token {} chooses expert {} twice: a token's experts are distinct", t, e);
    }
  }
  return {};
}

uint64_t Traffic::largest_edge() const {
  uint64_t most = 0;
  for (const TrafficEdge& e : edges) most = std::max(most, e.rows);
  return most;
}

Result<Traffic> count_traffic(const Paths& paths, const RoutedLayer& layer) {
  const uint32_t n = paths.n_ranks();
  if (n > kMaxTrafficRanks)
    return error(moecclUnsupported, "routings of {} ranks: at most {} are simulated", n, kMaxTrafficRanks);
  Traffic traffic;
  traffic.n_ranks = n;
  traffic.n_hops = paths.n_hops();
  traffic.level_rows.assign(layer.tree.depth(), 0);
  for (uint32_t from = 0; from < n; ++from) {
    traffic.out_first.push_back(static_cast<uint32_t>(traffic.edges.size()));
    for (uint32_t hop = 0; hop < traffic.n_hops; ++hop) {
      for (uint32_t to = 0; to < n; ++to) {
        if (!paths.edge(from, to) || paths.hop(from, to) != hop) continue;
        traffic.edges.push_back({.from = from,
                                 .to = to,
                                 .hop = static_cast<uint16_t>(hop),
                                 .level = static_cast<uint16_t>(layer.tree.level_between(from, to))});
      }
    }
  }
  traffic.out_first.push_back(static_cast<uint32_t>(traffic.edges.size()));
  index_edges(traffic);
  number_lists(traffic);
  Counter(paths, layer, traffic).count();
  sum_lists(traffic);
  return traffic;
}

}  // namespace moeccl::algo
