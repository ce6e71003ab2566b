// SPDX-License-Identifier: Apache-2.0
// Expert domains on any tree (HybridEP, Section IV-A). At every level, the groups of one parent form domains of S_ED
// groups. Experts are gathered inside a domain, and tokens travel between domains, always to the group at the same
// offset (Algorithm 1). On an even tree, a rank ends up with the experts of the box that its domains span. On an uneven
// tree, where a rank has no exact counterpart, the member that stands in for it (Groups::counterpart) takes its place.
#pragma once

#include <cstdint>
#include <vector>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

class Domains {
 public:
  // sizes[tree.depth()], each 1 or more, are the S_ED of each level, outermost first. The last domain of a parent may
  // be smaller. The tree is copied.
  static Result<Domains> make(const plan::LevelTree& tree, std::vector<uint32_t> sizes);

  const plan::LevelTree& tree() const { return tree_; }
  const std::vector<uint32_t>& sizes() const { return sizes_; }
  uint32_t n_ranks() const { return tree_.n_ranks; }
  // Returns true for plain expert parallelism, where every domain has one group.
  bool plain() const;

  // Returns the rank that runs the experts of `home` for the tokens of `rank`. Every rank on the hierarchical way to
  // the returned rank gets the same result, and so does the returned rank itself.
  uint32_t holder(uint32_t rank, uint32_t home) const;
  // Returns the owner of every expert as `rank` sees it.
  Placement seen_from(uint32_t rank, const Placement& homes) const;

  // One message of a level's AllGather: `from` sends `to` everything that it held before that level.
  struct Send {
    uint32_t from = 0, to = 0, level = 0;
  };
  // Sorted by (level, from, to). Outer levels come first: a slow link carries an expert once, inner levels pass it on.
  const std::vector<Send>& sends() const { return sends_; }
  // Returns the ranks whose experts `rank` holds before the AllGather of `level`, or at the end for depth(), in the
  // order in which they arrived.
  const std::vector<uint32_t>& held(uint32_t rank, uint32_t level) const {
    return held_[level * size_t{tree_.n_ranks} + rank];
  }
  uint64_t hash() const;

 private:
  Domains(const plan::LevelTree& tree, std::vector<uint32_t> sizes);
  // A group's parent, and its position among the parent's groups.
  struct Place {
    uint32_t parent = 0, index = 0;
  };
  uint32_t domain_of(uint32_t level, uint32_t group) const { return places_[level][group].index / sizes_[level]; }

  plan::LevelTree tree_;
  std::vector<uint32_t> sizes_;
  std::vector<std::vector<Place>> places_;                  // [level][group]
  std::vector<std::vector<std::vector<uint32_t>>> groups_;  // [level][parent] in order
  std::vector<plan::Groups> ranks_;                         // [level]
  std::vector<Send> sends_;
  std::vector<std::vector<uint32_t>> held_;  // [depth + 1][n_ranks]
};

}  // namespace moeccl::algo
