// SPDX-License-Identifier: Apache-2.0
// The outermost groups of a tree ("nodes") as two-level algorithms use them.
#pragma once

#include <algorithm>
#include <vector>

#include "src/algo/builder.h"

namespace moeccl::algo {

class Nodes : public plan::Groups {
 public:
  explicit Nodes(const LevelTree& tree) : Nodes(tree.levels.front().group_of_rank, tree.levels.front().n_groups) {}
  Nodes(const std::vector<uint32_t>& group_of_rank, uint32_t n_groups)
      : Groups(group_of_rank, n_groups), n_nodes_(n_groups), node_of_(group_of_rank) {}

  uint32_t n_nodes() const { return n_nodes_; }
  uint32_t node_of(uint32_t rank) const { return node_of_[rank]; }
  uint32_t largest() const {
    uint32_t most = 0;
    for (uint32_t node = 0; node < n_nodes_; ++node) most = std::max(most, size(node));
    return most;
  }
  uint32_t smallest() const {
    uint32_t least = ~0u;
    for (uint32_t node = 0; node < n_nodes_; ++node) least = std::min(least, size(node));
    return least;
  }
  // Returns the rank of `node` that handles data to or from `rank` of another node.
  uint32_t relay(uint32_t node, uint32_t rank) const { return counterpart(rank, node); }
  // Returns the ranks of other nodes for which `rank` is the relay of its node, node by node from the next one on, so
  // that ranks do not all send to the same node at once.
  std::vector<uint32_t> relayed_by(uint32_t rank) const {
    std::vector<uint32_t> ranks;
    const uint32_t node = node_of(rank), step = size(node);
    for (uint32_t i = 1; i < n_nodes(); ++i) {
      const std::span<const uint32_t> others = members((node + i) % n_nodes());
      for (uint32_t k = index_of(rank); k < others.size(); k += step) ranks.push_back(others[k]);
    }
    return ranks;
  }
  // Returns the other members of the rank's node, from the next one on; local_peers()[i] of all ranks form a
  // permutation.
  std::vector<uint32_t> local_peers(uint32_t rank) const {
    std::vector<uint32_t> ranks;
    const std::span<const uint32_t> mine = members(node_of(rank));
    for (uint32_t i = 1; i < mine.size(); ++i) ranks.push_back(mine[(index_of(rank) + i) % mine.size()]);
    return ranks;
  }
  // Returns the most slots that any rank needs as a relay, for one block from each member of its node to each relayed
  // rank.
  uint32_t relay_slots() const {
    uint32_t most = 0;
    for (uint32_t node = 0; node < n_nodes(); ++node) {
      uint32_t relayed = 0;  // by the first member, which has the most
      for (uint32_t other = 0; other < n_nodes(); ++other)
        if (other != node) relayed += (size(other) + size(node) - 1) / size(node);
      most = std::max(most, relayed * size(node));
    }
    return most;
  }

 private:
  uint32_t n_nodes_;
  std::vector<uint32_t> node_of_;  // [n_ranks]
};

// A relay's first slots take the blocks of the members of its node for the ranks that it relays: returns that of member
// `index` for the k-th of them.
inline uint32_t relay_slot(const Nodes& nodes, uint32_t relay, uint32_t k, uint32_t index) {
  return k * nodes.size(nodes.node_of(relay)) + index;
}

// Sends each local peer the blocks that it relays and, into slot `own`, its own block.
inline void send_local(ProgramBuilder& b, const Nodes& nodes, uint32_t rank, uint32_t own, uint32_t sig) {
  for (const uint32_t p : nodes.local_peers(rank)) {
    const std::vector<uint32_t> relayed = nodes.relayed_by(p);
    for (uint32_t k = 0; k < relayed.size(); ++k)
      b.put(slot(p, relay_slot(nodes, p, k, nodes.index_of(rank))), in(rank, relayed[k]));
    b.put(slot(p, own), in(rank, p));
    b.signal(p, sig);
  }
}

}  // namespace moeccl::algo
