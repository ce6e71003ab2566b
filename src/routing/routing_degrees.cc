// SPDX-License-Identifier: Apache-2.0
// The most neighbours that a rank has in the paths of an algorithm, and the most origins that share a block. They are
// counted by classes of ranks, so that a layer of 65536 ranks is checked in milliseconds; edges() lists the neighbours
// themselves.
#include <algorithm>
#include <functional>
#include <map>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

namespace {

// Sums over the ranks of one parent group by their position in their own group, modulo a group's size. A member of a
// group of that size stands in for exactly the ranks of one sum (Groups::counterpart). There is one table for each size
// that occurs, so n ranks cost n * sqrt(n) at worst, when all groups differ.
class ByPosition {
 public:
  // `groups` are those of one parent, with their ranks. value(rank) is what is summed.
  template <class Value>
  ByPosition(const std::vector<std::vector<uint32_t>>& groups, Value&& value) {
    for (const auto& group : groups) tables_.try_emplace(group.size(), std::vector<uint64_t>(group.size(), 0));
    for (const auto& group : groups)
      for (uint32_t position = 0; position < group.size(); ++position)
        for (auto& [size, table] : tables_) table[position % size] += value(group[position]);
  }
  uint64_t at(size_t group_size, uint32_t position) const { return tables_.at(group_size)[position]; }

 private:
  std::map<size_t, std::vector<uint64_t>> tables_;
};

// Returns the groups of `level` under each group of the level above, with their ranks ascending.
std::vector<std::vector<std::vector<uint32_t>>> families(const plan::LevelTree& tree, uint32_t level) {
  const std::vector<uint32_t>& group_of = tree.levels[level].group_of_rank;
  std::vector<std::vector<std::vector<uint32_t>>> all(level == 0 ? 1 : tree.levels[level - 1].n_groups);
  std::vector<uint32_t> index(tree.levels[level].n_groups, ~0u);
  for (uint32_t r = 0; r < tree.n_ranks; ++r) {
    auto& family = all[level == 0 ? 0 : tree.levels[level - 1].group_of_rank[r]];
    uint32_t& i = index[group_of[r]];
    if (i == ~0u) {
      i = static_cast<uint32_t>(family.size());
      family.emplace_back();
    }
    family[i].push_back(r);
  }
  return all;
}

}  // namespace

void Paths::find_degrees() {
  const std::vector<std::vector<uint32_t>> none(n_hops_, std::vector<uint32_t>(n_ranks(), 0));
  Degrees d{none, none};
  widths_ = {algorithm_.dedup(), std::vector<uint32_t>(n_hops_, 1)};
  if (!domain_edges_.empty())
    count_domain_edges(d);
  else if (algorithm_.kind == PathKind::k2dh)
    count_2dh(d);
  else
    count_levels(d);
  for (uint32_t h = 0; h < n_hops_; ++h)
    max_edges_.push_back(std::max(*std::max_element(d.in[h].begin(), d.in[h].end()),
                                  *std::max_element(d.out[h].begin(), d.out[h].end())));
  const auto most = [&](const std::vector<std::vector<uint32_t>>& by_hop) {
    std::vector<uint32_t> sum(n_ranks(), 0);
    for (const std::vector<uint32_t>& hop : by_hop)
      std::transform(sum.begin(), sum.end(), hop.begin(), sum.begin(), std::plus<>());
    return *std::max_element(sum.begin(), sum.end());
  };
  max_in_ = most(d.in);
  max_out_ = most(d.out);
}

double Paths::mean_rows(uint32_t hop, uint32_t top_k) const {
  const auto serving = [&](uint32_t level) {
    return static_cast<double>(std::count(serves_[level].begin(), serves_[level].end(), true));
  };
  const double origins = widths_.max_origins[hop];
  if (algorithm_.kind == PathKind::k2dh) return top_k * (hop == 0 ? serving(0) : origins) / serving(1);
  const double share = top_k / serving(hop);
  return origins * (algorithm_.dedup() ? std::min(1.0, share) : share);
}

// A rank sends to its counterpart in each other group that has experts, level by level.
void Paths::count_levels(Degrees& d) {
  // How many origins' rows a rank may hold before the hop; a block of that hop carries at most this many.
  std::vector<uint64_t> origins(n_ranks(), 1);
  for (uint32_t l = 0; l < tree_.depth(); ++l) {
    std::vector<uint64_t> after = origins;
    for (const auto& family : families(tree_, l)) {
      const auto serves = [&](const std::vector<uint32_t>& g) {
        return static_cast<bool>(serves_[l][tree_.levels[l].group_of_rank[g[0]]]);
      };
      const auto n_serving = static_cast<uint64_t>(std::count_if(family.begin(), family.end(), serves));
      const ByPosition n_senders(family, [](uint32_t) { return 1u; });
      const ByPosition n_origins(family, [&](uint32_t r) { return origins[r]; });
      for (const auto& group : family) {
        const uint64_t n_out = n_serving - serves(group);
        for (uint32_t position = 0; position < group.size(); ++position) {
          const uint32_t r = group[position];
          d.out[l][r] = static_cast<uint32_t>(n_out);
          if (n_out > 0) widths_.max_origins[l] = std::max(widths_.max_origins[l], static_cast<uint32_t>(origins[r]));
          if (!serves(group)) continue;
          // In its own group, a rank is the only member at its position.
          d.in[l][r] = static_cast<uint32_t>(n_senders.at(group.size(), position) - 1);
          after[r] = n_origins.at(group.size(), position);
        }
      }
    }
    origins = std::move(after);
  }
}

// Rows go inside a node to ranks with experts and to relays, then from relays to experts of other nodes.
void Paths::count_2dh(Degrees& d) {
  const std::vector<std::vector<uint32_t>> nodes = families(tree_, 0)[0];
  const std::vector<bool>& owns = serves_.back();
  const ByPosition experts(nodes, [&](uint32_t r) { return owns[r] ? 1u : 0u; });
  relays_.assign(n_ranks(), false);
  for (const auto& node : nodes) {
    const auto relayed = [&](uint32_t position) {
      return experts.at(node.size(), position) - owns[node[position]];  // ranks with experts that it stands in for
    };
    uint32_t n_inside = 0;
    for (uint32_t position = 0; position < node.size(); ++position) {
      relays_[node[position]] = relayed(position) > 0;
      n_inside += owns[node[position]] || relays_[node[position]];
    }
    for (uint32_t position = 0; position < node.size(); ++position) {
      const uint32_t r = node[position];
      const bool inside = owns[r] || relays_[r];
      d.out[0][r] = n_inside - inside;
      d.out[1][r] = static_cast<uint32_t>(relayed(position));
      if (inside) d.in[0][r] = static_cast<uint32_t>(node.size() - 1);
      if (owns[r]) d.in[1][r] = static_cast<uint32_t>(nodes.size() - 1);
      if (relays_[r]) widths_.max_origins[1] = std::max(widths_.max_origins[1], static_cast<uint32_t>(node.size()));
    }
  }
}

// Domains define an edge for each pair, so this counts pairs.
void Paths::count_domain_edges(Degrees& d) {
  const uint32_t n = n_ranks();
  std::vector<uint32_t> origins(n, 1);
  for (uint32_t h = 0; h < n_hops_; ++h) {
    std::vector<uint32_t> after = origins;
    for (uint32_t from = 0; from < n; ++from) {
      for (uint32_t to = 0; to < n; ++to) {
        if (!edge(from, to) || hop(from, to) != h) continue;
        ++d.out[h][from];
        ++d.in[h][to];
        after[to] += origins[from];
        widths_.max_origins[h] = std::max(widths_.max_origins[h], origins[from]);
      }
    }
    origins = std::move(after);
  }
}

}  // namespace moeccl::algo
