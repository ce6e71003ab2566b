// SPDX-License-Identifier: Apache-2.0
#include "src/routing/domains.h"

#include <algorithm>

#include "src/base/hash.h"

namespace moeccl::algo {

Result<Domains> Domains::make(const plan::LevelTree& tree, std::vector<uint32_t> sizes) {
  if (sizes.size() != tree.depth())
    return error(moecclInvalidArgument, "domain has {} sizes, the topology has {} level{}: give one for each level",
                 sizes.size(), tree.depth(), tree.depth() == 1 ? "" : "s");
  for (size_t l = 0; l < sizes.size(); ++l)
    if (sizes[l] < 1)
      return error(moecclInvalidArgument, "domain[{}] is 0: a domain of level {} has 1 group or more", l,
                   tree.levels[l].name);
  return Domains(tree, std::move(sizes));
}

Domains::Domains(const plan::LevelTree& tree, std::vector<uint32_t> sizes) : tree_(tree), sizes_(std::move(sizes)) {
  const uint32_t n = tree_.n_ranks, depth = tree_.depth();
  for (uint32_t l = 0; l < depth; ++l) {
    const plan::Level& level = tree_.levels[l];
    std::vector<Place>& places = places_.emplace_back(level.n_groups);
    auto& groups = groups_.emplace_back(l == 0 ? 1 : tree_.levels[l - 1].n_groups);
    const plan::Groups& ranks = ranks_.emplace_back(level);
    // Groups are numbered in the order of their first ranks, so each parent's groups are ascending.
    for (uint32_t group = 0; group < level.n_groups; ++group) {
      const uint32_t parent = l == 0 ? 0 : tree_.levels[l - 1].group_of_rank[ranks.members(group)[0]];
      places[group] = {parent, static_cast<uint32_t>(groups[parent].size())};
      groups[parent].push_back(group);
    }
  }
  held_.resize(size_t{depth + 1} * n);
  for (uint32_t r = 0; r < n; ++r) held_[r] = {r};
  for (uint32_t l = 0; l < depth; ++l) {
    for (uint32_t r = 0; r < n; ++r) held_[size_t{l + 1} * n + r] = held(r, l);
    for (uint32_t from = 0; from < n; ++from) {
      const uint32_t own = tree_.levels[l].group_of_rank[from];
      for (const uint32_t group : groups_[l][places_[l][own].parent]) {
        if (group == own || domain_of(l, group) != domain_of(l, own)) continue;
        const uint32_t to = ranks_[l].counterpart(from, group);
        sends_.push_back({from, to, l});
        std::vector<uint32_t>& there = held_[size_t{l + 1} * n + to];
        there.insert(there.end(), held(from, l).begin(), held(from, l).end());
      }
    }
  }
}

bool Domains::plain() const {
  return std::all_of(sizes_.begin(), sizes_.end(), [](uint32_t s) { return s == 1; });
}

uint32_t Domains::holder(uint32_t rank, uint32_t home) const {
  // `at` is where the token is; `home` holds the expert in the token's part of the tree, level by level.
  uint32_t at = rank;
  for (uint32_t l = 0; l < tree_.depth(); ++l) {
    const uint32_t here = tree_.levels[l].group_of_rank[at], there = tree_.levels[l].group_of_rank[home];
    if (here == there) continue;
    uint32_t target = here;
    if (domain_of(l, here) != domain_of(l, there)) {
      const std::vector<uint32_t>& groups = groups_[l][places_[l][there].parent];
      const uint32_t first = domain_of(l, there) * sizes_[l];
      const uint32_t size = std::min<uint32_t>(sizes_[l], static_cast<uint32_t>(groups.size()) - first);
      target = groups[first + places_[l][here].index % sizes_[l] % size];
      at = ranks_[l].counterpart(at, target);
    }
    if (target != there) home = ranks_[l].counterpart(home, target);
  }
  return at;
}

Placement Domains::seen_from(uint32_t rank, const Placement& homes) const {
  std::vector<int32_t> holder_of(tree_.n_ranks, -1), owner;
  for (const uint32_t home : homes.owner) {
    int32_t& h = holder_of[home];
    if (h < 0) h = static_cast<int32_t>(holder(rank, home));
    owner.push_back(h);
  }
  return *Placement::make(homes.n_experts(), homes.n_ranks, owner.data());
}

uint64_t Domains::hash() const {
  uint64_t h = tree_.hash();
  for (const uint32_t s : sizes_) h = hash_combine(h, s);
  return h;
}

}  // namespace moeccl::algo
