// SPDX-License-Identifier: Apache-2.0
// The homes of experts and the ways of rows. Every rank computes the same from (placement, tree, algorithm), so the
// origin of a token knows every rank that will touch it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/status.h"
#include "src/plan/levels.h"

namespace moeccl::algo {

class Domains;

// Maps each expert to the rank that owns it. A rank may own no expert.
struct Placement {
  uint32_t n_ranks = 0;
  std::vector<uint32_t> owner;        // [n_experts]
  std::vector<uint32_t> local_first;  // [n_ranks + 1] into local
  std::vector<uint32_t> local;        // experts grouped by owner, ascending
  std::vector<uint32_t> local_index;  // [n_experts] position of an expert among its owner's experts

  uint32_t n_experts() const { return static_cast<uint32_t>(owner.size()); }
  uint32_t n_local(uint32_t rank) const { return local_first[rank + 1] - local_first[rank]; }
  std::span<const uint32_t> experts_of(uint32_t rank) const {
    return {local.data() + local_first[rank], n_local(rank)};
  }
  // With owner null, experts are contiguous, and the first n_experts % n_ranks ranks own one more than the others.
  static Result<Placement> make(int64_t n_experts, uint32_t n_ranks, const int32_t* owner);
};

enum class PathKind : uint8_t {
  kFlat,  // one row per (token, choice), straight to the owner
  k2dh,   // one row per (token, choice), first inside the node to the destination's counterpart, then across (Tutel's
          // 2DH)
  kHier,  // HierMoE's HDd-AlltoAll: one row per (token, group) of each level (Eq. 7), outermost level first
};
struct MoeAlgorithm {
  PathKind kind = PathKind::kHier;
  uint32_t dims = 1;  // d of kHier

  bool dedup() const { return kind == PathKind::kHier; }
  std::string name() const;
  friend bool operator==(const MoeAlgorithm&, const MoeAlgorithm&) = default;
};
// Returns the algorithms that the tree offers. The first one wins a tie in price.
std::vector<MoeAlgorithm> moe_candidates(const plan::LevelTree& tree);
// Parses "flat", "2dh", "hier:1" ... The error lists what this tree offers.
Result<MoeAlgorithm> parse_moe_algorithm(std::string_view name, const plan::LevelTree& tree);

// A neighbour of a rank in the paths of an algorithm: rows flow from `in` edges' peers and to `out` edges' peers.
struct Edge {
  uint32_t peer = 0;
  uint32_t hop = 0;
  uint32_t peer_place = 0;        // this edge's position among the peer's edges of the hop in the other direction
  std::vector<uint32_t> origins;  // in: the ranks whose tokens may come this way, in the order of their rows in a block
};
struct RankEdges {
  std::vector<Edge> in, out;  // by (hop, peer)
  // Edges of smaller hops come first. These return how many of `in` precede a hop, and the first of `out` after it.
  uint32_t n_in_before(uint32_t hop) const;
  uint32_t first_out_after(uint32_t hop) const;
};
// `edges` are some of one rank in one direction, ordered by hop from the first one on. Returns the position of the last
// one among those of its hop. hop_of: the member or function that gives an edge's hop.
template <class Edges, class HopOf>
uint32_t place_in_hop(const Edges& edges, HopOf hop_of) {
  const auto hop = std::invoke(hop_of, edges.back());
  const auto first =
      std::partition_point(edges.begin(), edges.end(), [&](const auto& e) { return std::invoke(hop_of, e) < hop; });
  return static_cast<uint32_t>(edges.end() - first) - 1;
}

// How many slots of staging a block takes where a slot has `slot_rows` rows. A block of a later hop carries rows of
// many origins: with deduplication, one row of each fits. Without, a block has one slot.
struct BlockWidths {
  bool dedup = false;
  std::vector<uint32_t> max_origins;  // [hop] the most origins whose rows share one block
  uint32_t slots(uint32_t hop, uint64_t slot_rows) const {
    if (!dedup || slot_rows == 0 || slot_rows >= max_origins[hop]) return 1;
    return static_cast<uint32_t>((max_origins[hop] + slot_rows - 1) / slot_rows);
  }
  uint64_t rows(uint32_t hop, uint64_t slot_rows) const { return slots(hop, slot_rows) * slot_rows; }
  // Returns the least rows of a slot with which a block of `rows` rows fits, if widths stay as they are.
  uint64_t in_slot(uint32_t hop, uint64_t rows, uint64_t slot_rows) const {
    const uint64_t n = slots(hop, slot_rows);
    return (rows + n - 1) / n;
  }
};

class Paths {
 public:
  // `domains` says which rank computes for which, with the experts at home where `placement` says; null: experts stay
  // at home. With domains, the algorithm may not be k2dh, because its relays look at targets that are not theirs.
  Paths(MoeAlgorithm algorithm, const plan::LevelTree& tree, const Placement& placement,
        const Domains* domains = nullptr);

  const MoeAlgorithm& algorithm() const { return algorithm_; }
  uint32_t n_ranks() const { return tree_.n_ranks; }
  uint32_t n_hops() const { return n_hops_; }
  // Returns true if hop `h` crosses the tree's outermost level.
  bool crosses_outermost(uint32_t h) const { return algorithm_.kind == PathKind::k2dh ? h == 1 : h == 0; }
  // Returns the rank after `holder` on the way to `target` != holder. The result depends on nothing else, so paths that
  // meet stay together.
  uint32_t next(uint32_t holder, uint32_t target) const;
  // Returns the one hop that can use this ordered pair of ranks: the level at which they differ.
  uint32_t hop(uint32_t from, uint32_t to) const;
  // Returns true if some routing sends rows from `from` straight to `to`.
  bool edge(uint32_t from, uint32_t to) const;
  RankEdges edges(uint32_t rank) const;
  // The maximum over all ranks.
  uint32_t max_in() const { return max_in_; }
  uint32_t max_out() const { return max_out_; }
  // Returns the most origins whose rows share one block, of any hop or of one.
  uint32_t max_origins() const { return *std::max_element(widths_.max_origins.begin(), widths_.max_origins.end()); }
  uint32_t max_origins(uint32_t hop) const { return widths_.max_origins[hop]; }
  const BlockWidths& widths() const { return widths_; }
  // Returns the rows of a hop's block for each token of a rank, if all ranks choose top_k experts at random.
  double mean_rows(uint32_t hop, uint32_t top_k) const;
  // Returns the most edges of a hop that a rank has in one direction.
  uint32_t max_edges(uint32_t hop) const { return max_edges_[hop]; }
  // Returns the hash of the domains; 0 without domains.
  uint64_t domains_hash() const { return domains_hash_; }

 private:
  // Returns the peers of `rank` on one side, by (hop, peer).
  std::vector<uint32_t> peers(uint32_t rank, bool incoming) const;
  void append_origins(uint32_t from, uint32_t to, std::vector<uint32_t>& origins) const;
  // Defined in routing_degrees.cc: these find max_in_, max_out_, max_edges_, widths_, and relays_ of k2dh.
  struct Degrees {
    std::vector<std::vector<uint32_t>> in, out;  // [hop][rank]
  };
  void find_degrees();
  void count_levels(Degrees& d);
  void count_2dh(Degrees& d);
  void count_domain_edges(Degrees& d);
  void find_domain_edges(const Placement& placement, const Domains& domains);

  MoeAlgorithm algorithm_;
  plan::LevelTree tree_;  // truncated to the algorithm's dimensions
  uint32_t n_hops_ = 1;
  std::vector<plan::Groups> ranks_;        // [level]
  std::vector<std::vector<bool>> serves_;  // [level][group]: true if the group has experts
  std::vector<bool> relays_;               // k2dh: the rank is the counterpart of a rank with experts on another node
  std::vector<bool> domain_edges_;         // [from][to]; empty without domains
  uint64_t domains_hash_ = 0;
  uint32_t max_in_ = 0, max_out_ = 0;
  std::vector<uint32_t> max_edges_;  // [hop]
  BlockWidths widths_;
};

// The ranks after `from` on the way to each rank that owns experts; the owner comes last.
struct Ways {
  Ways() = default;
  Ways(const Paths& paths, const Placement& placement, uint32_t from);
  std::span<const uint32_t> to(uint32_t rank) const {
    return {hop.data() + first[rank], first[rank + 1] - first[rank]};
  }
  uint32_t n_ranks() const { return static_cast<uint32_t>(first.size() - 1); }

  std::vector<uint32_t> first{0}, hop;  // first: [n_ranks + 1] in `hop`
};

// The order in which sums are formed, equal for all algorithms: experts by (outermost group, ..., rank, expert). A
// group of any level is an interval of this order, so rows that one peer returns are adjacent in every token's list.
struct CanonicalOrder {
  std::vector<uint32_t> position;  // [n_experts]
  std::vector<uint16_t> expert;    // [n_experts] the inverse permutation
  CanonicalOrder(const plan::LevelTree& tree, const Placement& placement);
};

}  // namespace moeccl::algo
