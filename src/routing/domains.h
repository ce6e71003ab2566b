// SPDX-License-Identifier: Apache-2.0
// Expert domains on any tree (HybridEP, Section IV-A): at every level the groups of one parent stand in domains of
// S_ED groups. Inside a domain the experts are gathered, between domains the tokens travel, always to the group of the
// same offset (Algorithm 1). On an even tree a rank ends with the experts of the box that its domains span; on an
// uneven one the member that stands for a rank (Groups::counterpart) takes the place of one that does not exist.
#pragma once

#include <cstdint>
#include <vector>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

class Domains {
 public:
  // sizes[tree.depth()], each 1 or more: S_ED of each level, outermost first. The last domain of a parent may be
  // smaller. The tree is copied.
  static Result<Domains> make(const plan::LevelTree& tree, std::vector<uint32_t> sizes);

  const plan::LevelTree& tree() const { return tree_; }
  const std::vector<uint32_t>& sizes() const { return sizes_; }
  uint32_t n_ranks() const { return tree_.n_ranks; }
  // Plain expert parallelism: every domain has one group.
  bool plain() const;

  // The rank that computes for tokens of `rank` what the experts of `home` are asked. Every rank on a hierarchical way
  // to it names the same one, and it names itself.
  uint32_t holder(uint32_t rank, uint32_t home) const;
  // The owner of every expert as `rank` sees it.
  Placement seen_from(uint32_t rank, const Placement& homes) const;

  // One message of the AllGather of a level: what `from` holds before that level goes to `to`.
  struct Send {
    uint32_t from = 0, to = 0, level = 0;
  };
  // By (level, from, to). Outer levels first: a slow link carries an expert once, inner levels pass it on.
  const std::vector<Send>& sends() const { return sends_; }
  // Ranks whose experts `rank` holds before the AllGather of `level`, in the order in which they came; depth(): at the
  // end.
  const std::vector<uint32_t>& held(uint32_t rank, uint32_t level) const {
    return held_[level * size_t{tree_.n_ranks} + rank];
  }
  uint64_t hash() const;

 private:
  Domains(const plan::LevelTree& tree, std::vector<uint32_t> sizes);
  // Position of a group among its parent's, and its parent.
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
