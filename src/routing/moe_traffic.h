// How many rows every pair of ranks exchanges under an algorithm: the counts of HierMoE Eq. 7 for all ranks at once, in
// O(D T K). The simulator and the closed form of Eq. 1-6 read them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "src/routing/routing_paths.h"

namespace moeccl::algo {

// The choices of all ranks, token by token, ranks in order.
struct GlobalRouting {
  uint32_t n_ranks = 1;
  uint32_t top_k = 1;
  std::vector<uint64_t> first_token;  // [n_ranks + 1]
  std::vector<int32_t> expert;        // [tokens][top_k], -1: none

  uint64_t n_tokens() const { return first_token.back(); }
};
// Which choices are out of range or named twice by a token; the sentence names the token.
Status check_routing(const GlobalRouting& routing, uint32_t n_experts);

// An ordered pair of ranks between which rows may go; it belongs to one hop.
struct TrafficEdge {
  uint32_t from = 0, to = 0;
  uint16_t hop = 0, level = 0;  // level: of the full tree, where the two differ
  uint64_t rows = 0;
  uint64_t delivered = 0;  // of them, rows that an expert on `to` keeps
  uint64_t returned = 0;   // rows that combine sends back: a row of several choices returns once
};

struct Traffic {
  uint32_t n_ranks = 0, n_hops = 1;
  std::vector<TrafficEdge> edges;      // by (from, hop, to)
  std::vector<uint32_t> out_first;     // [n_ranks + 1] into edges
  std::vector<uint32_t> in_first, in;  // [n_ranks + 1] into `in`: edges by (to, hop, from)
  std::vector<uint64_t> own;           // [n_ranks] own rows with an expert on the rank itself
  std::vector<uint64_t> level_rows;    // [depth] rows that cross each level

  std::span<const uint32_t> in_of(uint32_t rank) const {
    return {in.data() + in_first[rank], in_first[rank + 1] - in_first[rank]};
  }
  uint64_t largest_edge() const;
};

inline constexpr uint32_t kMaxTrafficRanks = 16384;  // two dense tables of n^2 words are filled

// domains: those of `paths`, with the experts at home where `placement` says; null: none.
Result<Traffic> count_traffic(const Paths& paths, const plan::LevelTree& tree, const Placement& placement,
                              const GlobalRouting& routing, const Domains* domains = nullptr);

}  // namespace moeccl::algo
