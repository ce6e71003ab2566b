// SPDX-License-Identifier: Apache-2.0
// The topology as planners see it: a tree of levels, outermost first, whose last level is the ranks themselves.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "src/base/status.h"

namespace moeccl::plan {

// Alpha-beta cost of a group's uplink at a level, for each direction separately. A bytes_per_ns of 0 means that it is
// not known or not paced.
struct LinkCost {
  double alpha_ns = 0;
  double bytes_per_ns = 0;  // = GB/s, 1e9 bytes a second
};

struct Level {
  std::string name;                     // "node", "socket", "gpu"
  LinkCost link;                        // between different groups of this level (inside one group of the level above)
  std::vector<uint32_t> group_of_rank;  // [n_ranks], groups numbered 0.. in order of their first rank
  uint32_t n_groups = 0;
  std::string network = {};  // if the groups are hosts: the network that carries the data between them, for explain
};

// The ranks of each group of a level.
class Groups {
 public:
  explicit Groups(const Level& level) : Groups(level.group_of_rank, level.n_groups) {}
  Groups(const std::vector<uint32_t>& group_of_rank, uint32_t n_groups);

  std::span<const uint32_t> members(uint32_t group) const {  // ascending
    return {member_.data() + first_[group], first_[group + 1] - first_[group]};
  }
  uint32_t size(uint32_t group) const { return first_[group + 1] - first_[group]; }
  uint32_t n_ranks() const { return static_cast<uint32_t>(member_.size()); }
  uint32_t index_of(uint32_t rank) const { return index_[rank]; }  // among its group's members
  // Returns the member of `group` that stands for `rank`: the one at the same position, modulo the group's size. With
  // even groups this is the peer of equal index in hierarchical AlltoAll.
  uint32_t counterpart(uint32_t rank, uint32_t group) const {
    return member_[first_[group] + index_[rank] % size(group)];
  }

 private:
  std::vector<uint32_t> first_, member_;  // [n_groups + 1], [n_ranks]
  std::vector<uint32_t> index_;           // [n_ranks]
};

// One level above the ranks, given by the sizes of its groups; see LevelTree::from_sizes.
struct LevelSizes {
  std::string name;
  LinkCost link;
  std::vector<uint32_t> sizes;
};

inline constexpr uint32_t kMaxRanks = 1u << 20;  // bounds what a topology text can make us allocate

struct LevelTree {
  uint32_t n_ranks = 0;
  std::vector<Level> levels;  // never empty; each refines the one before; in the last one every rank is a group
  // Links of the outermost levels, up to this many, join hosts: data crosses them by puts, and a sender waits for round
  // trips. Links of the others are within hosts, whose ranks read each other's memory. By default all levels count, as
  // where links are paced. Other trees that are made from this one do not keep it.
  uint32_t n_far_levels = ~0u;

  uint32_t depth() const { return static_cast<uint32_t>(levels.size()); }
  // Returns the outermost level at which a and b are in different groups, or depth() if a == b.
  uint32_t level_between(uint32_t a, uint32_t b) const;
  // Returns the groups of the innermost level above the ranks, which hold equal data under tensor parallelism
  // (pipeline.h), or one group if there is no such level.
  std::vector<uint32_t> tensor_groups() const;  // [n_ranks]
  uint32_t n_tensor_groups() const { return depth() < 2 ? 1 : levels[depth() - 2].n_groups; }
  // Returns a tree of one level, "rank".
  static LevelTree flat(uint32_t n_ranks);
  // Builds a tree from group sizes per level, outermost first; the rank level comes last and is implied by them:
  // {{"node", {}, {7, 8}}} is two nodes of 7 and 8 ranks. sizes count the groups of the next level (ranks for the last
  // entry), so each entry has as many sizes as the entry before has groups in total.
  static Result<LevelTree> from_sizes(const std::vector<LevelSizes>& upper, const std::string& rank_name = "rank",
                                      LinkCost rank_link = {});
  // Checks the invariants above.
  Status validate() const;
  // Returns the tree with only the first d-1 levels and the rank level: the dimensions of HDd-AlltoAll (HierMoE Section
  // III-A).
  LevelTree truncated(uint32_t d) const;
  // Returns the tree of some of the ranks, in this order, without levels that do not tell any of them apart.
  LevelTree part(std::span<const uint32_t> ranks) const;
  // Returns a number that differs when trees differ.
  uint64_t hash() const;
};

}  // namespace moeccl::plan
