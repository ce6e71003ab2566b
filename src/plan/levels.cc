// SPDX-License-Identifier: Apache-2.0
#include "src/plan/levels.h"

#include <bit>
#include <cmath>
#include <map>
#include <numeric>

namespace moeccl::plan {

namespace {

// FNV-1a over 64-bit words, with a final mix so that small numbers spread over all bits.
class Hash {
 public:
  void add(uint64_t word) { state_ = (state_ ^ word) * 0x100000001b3ull; }
  void add(double number) { add(std::bit_cast<uint64_t>(number)); }
  void add(const std::string& text) {
    add(uint64_t{text.size()});
    for (const char c : text) add(uint64_t{static_cast<unsigned char>(c)});
  }
  uint64_t value() const {
    const uint64_t x = (state_ ^ (state_ >> 32)) * 0x9e3779b97f4a7c15ull;
    return x ^ (x >> 29);
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325ull;
};

Level rank_level(uint32_t n_ranks, std::string name, LinkCost link) {
  Level level{std::move(name), link, std::vector<uint32_t>(n_ranks), n_ranks};
  for (uint32_t r = 0; r < n_ranks; ++r) level.group_of_rank[r] = r;
  return level;
}

bool plausible(const LinkCost& link) {
  return std::isfinite(link.alpha_ns) && link.alpha_ns >= 0 && std::isfinite(link.bytes_per_ns) &&
         link.bytes_per_ns >= 0;
}

// Checks that groups are dense and numbered in order of their first rank.
Status validate_numbering(const Level& level, uint32_t n_ranks) {
  if (level.name.empty()) return error(moecclInvalidArgument, "a level of the topology has no name");
  if (!plausible(level.link))
    return error(moecclInvalidArgument, "level {}: latency and bandwidth must be finite and not negative", level.name);
  if (level.group_of_rank.size() != n_ranks)
    return error(moecclInvalidArgument, "level {} places {} ranks, the topology has {}", level.name,
                 level.group_of_rank.size(), n_ranks);
  uint32_t next = 0;
  for (uint32_t r = 0; r < n_ranks; ++r) {
    const uint32_t group = level.group_of_rank[r];
    if (group > next)
      return error(moecclInvalidArgument, "level {}: rank {} is in group {}, but the next new group is {}", level.name,
                   r, group, next);
    next += group == next;
  }
  if (next != level.n_groups)
    return error(moecclInvalidArgument, "level {} says {} groups, its ranks are in {}", level.name, level.n_groups,
                 next);
  return {};
}

Status validate_refinement(const Level& outer, const Level& inner) {
  constexpr uint32_t kNone = ~0u;
  std::vector<uint32_t> outer_of(inner.n_groups, kNone);
  for (uint32_t r = 0; r < inner.group_of_rank.size(); ++r) {
    uint32_t& seen = outer_of[inner.group_of_rank[r]];
    if (seen == kNone) seen = outer.group_of_rank[r];
    if (seen != outer.group_of_rank[r])
      return error(moecclInvalidArgument, "{} {} lies in {} {} and in {} {}: a group must lie in one group", inner.name,
                   inner.group_of_rank[r], outer.name, seen, outer.name, outer.group_of_rank[r]);
  }
  return {};
}

}  // namespace

Groups::Groups(const std::vector<uint32_t>& group_of_rank, uint32_t n_groups)
    : first_(n_groups + 1, 0), member_(group_of_rank.size()), index_(group_of_rank.size()) {
  for (const uint32_t group : group_of_rank) ++first_[group + 1];
  std::partial_sum(first_.begin(), first_.end(), first_.begin());
  std::vector<uint32_t> filled(n_groups, 0);
  for (uint32_t rank = 0; rank < group_of_rank.size(); ++rank) {
    const uint32_t group = group_of_rank[rank];
    index_[rank] = filled[group]++;
    member_[first_[group] + index_[rank]] = rank;
  }
}

uint32_t LevelTree::level_between(uint32_t a, uint32_t b) const {
  for (uint32_t l = 0; l < depth(); ++l)
    if (levels[l].group_of_rank[a] != levels[l].group_of_rank[b]) return l;
  return depth();
}

std::vector<uint32_t> LevelTree::tensor_groups() const {
  return depth() < 2 ? std::vector<uint32_t>(n_ranks, 0) : levels[depth() - 2].group_of_rank;
}

LevelTree LevelTree::flat(uint32_t n_ranks) { return {n_ranks, {rank_level(n_ranks, "rank", {})}}; }

Result<LevelTree> LevelTree::from_sizes(const std::vector<LevelSizes>& upper, const std::string& rank_name,
                                        LinkCost rank_link) {
  if (upper.empty()) return error(moecclInvalidArgument, "no group sizes: a flat topology is LevelTree::flat()");
  for (size_t l = 0; l < upper.size(); ++l) {
    uint64_t next = 0;
    for (const uint32_t size : upper[l].sizes) {
      if (size == 0) return error(moecclInvalidArgument, "level {} has an empty group", upper[l].name);
      next += size;
    }
    if (next == 0 || next > kMaxRanks)
      return error(moecclInvalidArgument, "level {} holds {} groups: between 1 and {} are possible", upper[l].name,
                   next, kMaxRanks);
    if (l + 1 < upper.size() && next != upper[l + 1].sizes.size())
      return error(moecclInvalidArgument, "level {} has {} groups, level {} gives sizes of {}", upper[l].name, next,
                   upper[l + 1].name, upper[l + 1].sizes.size());
  }
  // From the innermost level outwards: the ranks of a group are the sum over its groups of the next level.
  std::vector<std::vector<uint32_t>> ranks_in(upper.size());
  ranks_in.back() = upper.back().sizes;
  for (size_t l = upper.size() - 1; l-- > 0;) {
    size_t next = 0;
    for (const uint32_t size : upper[l].sizes) {
      uint32_t ranks = 0;
      for (uint32_t i = 0; i < size; ++i) ranks += ranks_in[l + 1][next++];
      ranks_in[l].push_back(ranks);
    }
  }
  uint64_t n_ranks = 0;
  for (const uint32_t ranks : ranks_in[0]) n_ranks += ranks;
  LevelTree tree;
  tree.n_ranks = static_cast<uint32_t>(n_ranks);
  for (size_t l = 0; l < upper.size(); ++l) {
    Level level{upper[l].name, upper[l].link, {}, static_cast<uint32_t>(ranks_in[l].size())};
    for (uint32_t group = 0; group < level.n_groups; ++group)
      level.group_of_rank.insert(level.group_of_rank.end(), ranks_in[l][group], group);
    tree.levels.push_back(std::move(level));
  }
  tree.levels.push_back(rank_level(tree.n_ranks, rank_name, rank_link));
  MOECCL_TRY(tree.validate());
  return tree;
}

Status LevelTree::validate() const {
  if (n_ranks == 0 || n_ranks > kMaxRanks)
    return error(moecclInvalidArgument, "a topology of {} ranks: between 1 and {} are possible", n_ranks, kMaxRanks);
  if (levels.empty()) return error(moecclInvalidArgument, "a topology needs at least the level of its ranks");
  for (size_t l = 0; l < levels.size(); ++l) {
    MOECCL_TRY(validate_numbering(levels[l], n_ranks));
    if (l > 0) MOECCL_TRY(validate_refinement(levels[l - 1], levels[l]));
  }
  if (levels.back().n_groups != n_ranks)
    return error(moecclInvalidArgument, "the last level, {}, has {} groups for {} ranks: each rank must be its own",
                 levels.back().name, levels.back().n_groups, n_ranks);
  return {};
}

LevelTree LevelTree::truncated(uint32_t d) const {
  LevelTree tree{n_ranks, {}};
  for (uint32_t l = 0; l + 1 < d && l + 1 < depth(); ++l) tree.levels.push_back(levels[l]);
  tree.levels.push_back(levels.back());
  return tree;
}

LevelTree LevelTree::part(std::span<const uint32_t> ranks) const {
  const auto n = static_cast<uint32_t>(ranks.size());
  LevelTree own{n, {}};
  for (uint32_t l = 0; l < depth(); ++l) {
    Level level{levels[l].name, levels[l].link, {}, 0};
    std::map<uint32_t, uint32_t> number;
    for (const uint32_t r : ranks)
      level.group_of_rank.push_back(
          number.try_emplace(levels[l].group_of_rank[r], static_cast<uint32_t>(number.size())).first->second);
    level.n_groups = static_cast<uint32_t>(number.size());
    const bool last = l + 1 == depth();
    if (!last && level.n_groups == 1) continue;
    const bool alone = level.n_groups == n;  // the ranks take the link of the outermost such level
    own.levels.push_back(std::move(level));
    if (alone) break;
  }
  return own;
}

uint64_t LevelTree::hash() const {
  Hash hash;
  hash.add(uint64_t{n_ranks});
  for (const Level& level : levels) {
    hash.add(level.name);
    hash.add(level.link.alpha_ns);
    hash.add(level.link.bytes_per_ns);
    for (const uint32_t group : level.group_of_rank) hash.add(uint64_t{group});
  }
  return hash.value();
}

}  // namespace moeccl::plan
