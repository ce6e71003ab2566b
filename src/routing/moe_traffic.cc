#include "src/routing/moe_traffic.h"

#include <algorithm>
#include <numeric>

#include "src/routing/domains.h"

namespace moeccl::algo {

namespace {

constexpr uint32_t kMaxTopK = 64;

// The next ranks on the way from one origin to every target with experts.
class Ways {
 public:
  explicit Ways(const Paths& paths) : paths_(paths), stride_(paths.n_hops()) {
    to_.resize(size_t{paths.n_ranks()} * stride_);
    length_.resize(paths.n_ranks());
  }
  // placement: as the origin sees it.
  void from(uint32_t origin, const Placement& placement) {
    for (uint32_t x = 0; x < paths_.n_ranks(); ++x) {
      length_[x] = 0;
      if (placement.n_local(x) == 0) continue;
      for (uint32_t at = origin; at != x;) to_[size_t{x} * stride_ + length_[x]++] = at = paths_.next(at, x);
    }
  }
  std::span<const uint32_t> to(uint32_t target) const { return {&to_[size_t{target} * stride_], length_[target]}; }

 private:
  const Paths& paths_;
  uint32_t stride_;
  std::vector<uint32_t> to_, length_;
};

class Counter {
 public:
  Counter(const Paths& paths, const plan::LevelTree& tree, const Placement& homes, const Domains* domains)
      : paths_(paths),
        tree_(tree),
        homes_(homes),
        domains_(domains),
        placement_(homes),
        order_(tree, homes),
        n_(paths.n_ranks()),
        ways_(paths) {
    rows_.assign(size_t{n_} * n_, 0);
    delivered_.assign(size_t{n_} * n_, 0);
    if (!paths.algorithm().dedup()) returned_.assign(size_t{n_} * n_, 0);
  }
  void count(const GlobalRouting& routing, std::vector<uint64_t>& own) {
    own.assign(n_, 0);
    for (uint32_t origin = 0; origin < n_; ++origin) {
      if (domains_ != nullptr) {
        placement_ = domains_->seen_from(origin, homes_);
        order_ = CanonicalOrder(tree_, placement_);
      }
      ways_.from(origin, placement_);
      for (uint64_t t = routing.first_token[origin]; t < routing.first_token[origin + 1]; ++t)
        token(origin, {routing.expert.data() + t * routing.top_k, routing.top_k}, own[origin]);
    }
  }
  uint32_t rows(uint32_t from, uint32_t to) const { return rows_[size_t{from} * n_ + to]; }
  uint32_t delivered(uint32_t from, uint32_t to) const { return delivered_[size_t{from} * n_ + to]; }
  uint32_t returned(uint32_t from, uint32_t to) const {
    return returned_.empty() ? rows(from, to) : returned_[size_t{from} * n_ + to];
  }

 private:
  // Choices in canonical order: a row that already travels is on the way of the choice before (Eq. 7).
  void token(uint32_t origin, std::span<const int32_t> choices, uint64_t& own) {
    uint32_t position[kMaxTopK], n = 0;
    for (const int32_t e : choices) {
      if (e < 0) continue;
      const uint32_t p = order_.position[static_cast<uint32_t>(e)];
      uint32_t i = n++;
      for (; i > 0 && position[i - 1] > p; --i) position[i] = position[i - 1];
      position[i] = p;
    }
    const bool dedup = paths_.algorithm().dedup();
    std::span<const uint32_t> before;
    uint32_t owner_before = ~0u;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t owner = placement_.owner[order_.expert[position[i]]];
      const std::span<const uint32_t> way = ways_.to(owner);
      const bool again = owner == owner_before;
      owner_before = owner;
      if (again && dedup) continue;
      if (way.empty()) {
        own += again ? 0 : 1;
        before = way;
        continue;
      }
      size_t shared = 0;
      while (dedup && shared < way.size() && shared < before.size() && way[shared] == before[shared]) ++shared;
      for (size_t h = shared; h < way.size(); ++h) {
        const size_t pair = size_t{h == 0 ? origin : way[h - 1]} * n_ + way[h];
        ++rows_[pair];
        if (!dedup && !again) ++returned_[pair];
      }
      if (!again) ++delivered_[size_t{way.size() < 2 ? origin : way[way.size() - 2]} * n_ + way.back()];
      before = way;
    }
  }

  const Paths& paths_;
  const plan::LevelTree& tree_;
  const Placement& homes_;
  const Domains* domains_;
  Placement placement_;  // as the origin at hand sees it
  CanonicalOrder order_;
  uint32_t n_;
  Ways ways_;
  std::vector<uint32_t> rows_, delivered_;
  std::vector<uint32_t> returned_;  // empty: what was sent
};

void index_edges(Traffic& traffic) {
  const uint32_t n = traffic.n_ranks;
  traffic.in_first.assign(n + 1, 0);
  for (const TrafficEdge& e : traffic.edges) ++traffic.in_first[e.to + 1];
  std::partial_sum(traffic.in_first.begin(), traffic.in_first.end(), traffic.in_first.begin());
  traffic.in.resize(traffic.edges.size());
  std::vector<uint32_t> filled(traffic.in_first.begin(), traffic.in_first.end() - 1);
  // Edges come by their sender, so each receiver's are ascending within a hop.
  for (uint32_t hop = 0; hop < traffic.n_hops; ++hop) {
    for (uint32_t e = 0; e < traffic.edges.size(); ++e)
      if (traffic.edges[e].hop == hop) traffic.in[filled[traffic.edges[e].to]++] = e;
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

Result<Traffic> count_traffic(const Paths& paths, const plan::LevelTree& tree, const Placement& placement,
                              const GlobalRouting& routing, const Domains* domains) {
  const uint32_t n = paths.n_ranks();
  if (n > kMaxTrafficRanks)
    return error(moecclUnsupported, "routings of {} ranks: at most {} are simulated", n, kMaxTrafficRanks);
  Counter counter(paths, tree, placement, domains);
  Traffic traffic;
  traffic.n_ranks = n;
  traffic.n_hops = paths.n_hops();
  counter.count(routing, traffic.own);
  traffic.level_rows.assign(tree.depth(), 0);
  for (uint32_t from = 0; from < n; ++from) {
    traffic.out_first.push_back(static_cast<uint32_t>(traffic.edges.size()));
    for (uint32_t hop = 0; hop < traffic.n_hops; ++hop) {
      for (uint32_t to = 0; to < n; ++to) {
        if (!paths.edge(from, to) || paths.hop(from, to) != hop) continue;
        TrafficEdge e{from,
                      to,
                      static_cast<uint16_t>(hop),
                      static_cast<uint16_t>(tree.level_between(from, to)),
                      counter.rows(from, to),
                      counter.delivered(from, to),
                      counter.returned(from, to)};
        traffic.level_rows[e.level] += e.rows;
        traffic.edges.push_back(e);
      }
    }
  }
  traffic.out_first.push_back(static_cast<uint32_t>(traffic.edges.size()));
  index_edges(traffic);
  return traffic;
}

}  // namespace moeccl::algo
