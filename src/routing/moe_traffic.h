// SPDX-License-Identifier: Apache-2.0
// Counts the rows that every pair of ranks exchanges under an algorithm: the counts of HierMoE Eq. 7 for all ranks at
// once, in O(D T K). The prices of simulated plans and the closed form of Eq. 1-6 use them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

// The choices of all ranks, token by token, with ranks in order.
struct GlobalRouting {
  uint32_t n_ranks = 1;
  uint32_t top_k = 1;
  std::vector<uint64_t> first_token;  // [n_ranks + 1]
  std::vector<int32_t> expert;        // [tokens][top_k], -1: none

  uint64_t n_tokens() const { return first_token.back(); }
};
// Returns an error if a choice is out of range or a token names an expert twice; the error names the token.
Status check_routing(const GlobalRouting& routing, uint32_t n_experts);

// An ordered pair of ranks between which rows may go; it belongs to one hop.
struct TrafficEdge {
  uint32_t from = 0, to = 0;
  uint16_t hop = 0, level = 0;  // level: of the full tree, where hop and level differ
  uint32_t in_place = 0;        // position among the receiver's edges
  uint64_t rows = 0;
  uint64_t first_list = 0;  // the first of its lists in Traffic::rows, which are ordered by source

  bool operator==(const TrafficEdge&) const = default;
};

// Row lists are numbered like those of RowLists (routing_tables.h), so that plans can be priced without the lists.
struct Traffic {
  uint32_t n_ranks = 0, n_hops = 1;
  std::vector<TrafficEdge> edges;      // by (from, hop, to)
  std::vector<uint32_t> out_first;     // [n_ranks + 1] into edges
  std::vector<uint32_t> in_first, in;  // [n_ranks + 1] into `in`: edges by (to, hop, from)
  std::vector<uint64_t> first_list;    // [n_ranks + 1] of each rank into rows: gather lists, then scatter lists
  std::vector<uint32_t> rows;          // [lists] rows that dispatch moves
  std::vector<uint32_t> returned;      // [lists] rows that combine returns; empty: as many as were sent
  std::vector<uint64_t> tokens;        // [n_ranks]
  std::vector<uint64_t> level_rows;    // [depth] rows that cross each level
  std::vector<bool> owns;              // [n_ranks] true if the rank has experts, as it sees them itself

  std::span<const uint32_t> in_of(uint32_t rank) const {
    return {in.data() + in_first[rank], in_first[rank + 1] - in_first[rank]};
  }
  uint64_t scatter_list(uint32_t rank) const { return first_list[rank + 1] - 1 - in_of(rank).size(); }
  uint64_t largest_edge() const;
  bool operator==(const Traffic&) const = default;
};

inline constexpr uint32_t kMaxTrafficRanks = 16384;  // the pairs of ranks are visited one by one

// A routing, and the layer that it is for.
struct RoutedLayer {
  const plan::LevelTree& tree;
  const Placement& placement;
  const GlobalRouting& routing;
  bool expert_major = false;
  const Domains* domains = nullptr;  // those of the paths, with the experts at home where `placement` says
};
Result<Traffic> count_traffic(const Paths& paths, const RoutedLayer& layer);

}  // namespace moeccl::algo
