// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that turn a rank's own top-k choices into what it sends the other ranks: counts of the rows
// on every level's links, and the records of src/routing/routing.h. OwnChoices::assign, count_rows and
// RecordWriter::write in that header define the results, and these kernels match them byte for byte.
//
// A key is one of the rank's choices in canonical order: position * kRouteChoices + k. A token's keys ascend. Entries
// that are no choice (-1, or dropped because of the capacity) are kNoChoice.
#pragma once

#include <cstdint>

namespace moeccl::cuda {

inline constexpr uint32_t kRouteChoices = 64;  // top_k <= 64
inline constexpr uint32_t kNoChoice = ~0u;
inline constexpr uint32_t kRecordTile = 256;   // tokens that a warp handles at a time
inline constexpr uint32_t kLevelSlots = 1024;  // groups counted in a block's shared memory; others in global memory

struct RouteOrderKernelArgs {
  const int32_t* topk;       // [n_tokens][top_k], -1: none
  const uint32_t* position;  // [n_experts] in canonical order
  uint32_t n_tokens, top_k, n_experts;
  uint32_t* key;  // [n_tokens][top_k]
  uint32_t* bad;  // the first token with a choice that names no expert, or one twice; ~0 (set beforehand): none
};

// Lists the tokens that chose each expert in ascending order: list[first[e] .. first[e + 1]). A token that names an
// expert twice, which route_order reports, is in its list once. There are three launches: count, scan, fill.
inline constexpr uint32_t kRouteTile = 256;  // tokens of a block
struct RouteKernelArgs {
  const int32_t* topk;  // [n_tokens][top_k], -1: none
  uint32_t n_tokens, top_k, n_experts, n_tiles;
  uint32_t* tile_count;  // [n_tiles][n_experts]; after the scan: position of the tile's first token in `list`
  uint32_t* first;       // [n_experts + 1]
  uint32_t* list;        // at most n_tokens * top_k tokens
};

// The first `capacity` tokens of each expert stay. first and list are those of RouteKernelArgs.
struct RouteDropKernelArgs {
  const uint32_t *first, *list;
  const uint32_t* position;  // [n_experts]
  uint32_t n_experts, top_k, capacity;
  uint32_t* key;
  int32_t* drop_counts;  // [n_experts]
};

// The ranks after this one on the way to each rank with experts, with the target last: way_to[way_first[r] ..
// way_first[r + 1]). way_slot is the group that each hop enters, counted over all levels.
struct RouteWays {
  const uint32_t* owner;  // [positions] the rank of each expert
  const uint32_t *way_first, *way_to, *way_slot;
};

// Counts the rows into each group (HierMoE Eq. 7). With dedup, a row that already travels is counted once.
struct RouteLevelsKernelArgs {
  const uint32_t* key;
  RouteWays ways;
  uint32_t n_tokens, top_k, n_slots, dedup;
  uint32_t* rows;  // [n_slots], zeroed beforehand
};

// Three launches: count, scan, fill. The last of the n_ranks + 1 peers is this rank's own list of all its choices.
struct RouteTotals {
  uint32_t records, choices, weights;
  uint32_t first_word;  // of the message in `words`; for peer n_ranks: the end of all messages
};
struct RouteRecordsKernelArgs {
  const uint32_t* key;
  RouteWays ways;
  const uint32_t* expert;  // [positions]
  const float* weight;     // [n_tokens][top_k] or null
  uint32_t n_tokens, top_k, n_ranks, n_tiles;
  RouteTotals* tile;       // [n_tiles][n_ranks + 1]; after the scan: the totals before the tile
  RouteTotals* total;      // [n_ranks + 1]
  uint32_t* words;         // messages in rank order
  uint8_t* own_n_experts;  // [n_tokens]
  uint16_t* own_expert;    // [choices], like the two below
  uint32_t* own_choice;    // token * top_k + k
  float* own_weight;
};

}  // namespace moeccl::cuda
