// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that make a routing's tables (walk_rows_args.h) on the device, out of all ranks' choices:
// what algo::RoutingTables makes on the host out of records, list by list. Each rank gets every rank's kept choices (an
// AllGather of blocks) and takes out of them what comes by: the records that it would otherwise have been sent.
//
// Tokens are cut into tiles, of one origin and one chunk each; a warp walks a tile, first to count, then, after
// prefix sums over the tiles, to write. The order of lists is (chunk, source, origin, token), that of Output (origin,
// token): each has counters of its own.
#pragma once

#include "kernels/cuda/walk_rows_args.h"

namespace moeccl::cuda {

inline constexpr uint16_t kNoExpert = 0xffff;

// The start of a rank's block. Behind it, at offsets that all ranks know: expert [max_tokens][top_k] u16, the kept ones
// of a token first and in canonical order, then kNoExpert; weight [max_tokens][top_k] float, at the same places.
struct TableBlock {
  uint32_t n_tokens, weighted;
  uint32_t wrong;        // TableFault
  uint32_t wrong_value;  // the token, or how many tokens there are
};
enum class TableFault : uint32_t { kNone, kChoices, kTokens, kWeights };

// A rank's own part. take: choices beyond the number of tokens become none; pack: after route_order and route_drop.
struct TableOwnKernelArgs {
  const int32_t* topk;       // [n_tokens][top_k]
  const float* weight;       // the same, or null
  const uint64_t* n_tokens;  // in device memory, or null: all
  uint64_t most_tokens;      // rows of topk
  uint32_t top_k;
  int32_t* choices;        // [most_tokens][top_k]
  uint32_t* bad;           // as in RouteOrderKernelArgs
  const uint32_t* key;     // [most_tokens][top_k]
  const uint32_t* expert;  // [positions]
  uint8_t* block;
  uint64_t expert_at, weight_at;  // byte offsets in it
};

// What does not change between updates of one plan. Sources and lists are numbered as in algo::RowLists; a place is one
// of the origins whose rows come by, in the order of sources.
struct TableConstants {
  const uint64_t* passes;       // [n_experts] bit o: choices of origin o come by
  const int32_t* way;           // [n_experts] out edge, or algo::RankPaths::kHere
  const uint32_t* owner;        // [n_experts]
  const uint32_t* local_index;  // [n_experts] of local ones
  const uint32_t* level;  // [n_ranks][n_ranks] levels from the innermost to where two ranks differ: RowTerm::close
  const uint32_t* place_origin;  // [n_places]
  const uint32_t* place_source;  // [n_places]
  const uint32_t* place_order;   // [n_places] by origin
  const uint32_t* source_first;  // [n_sources + 1] places
  const uint32_t* first_out;     // [n_sources]
  const uint32_t* gather_first;  // [n_out + 1] lists
  const uint64_t* zeros;         // as many as there may be rows of padding, and one
  uint32_t rank, n_ranks, n_experts, n_local, n_places, n_sources, n_out;
  uint32_t top_k, max_tokens, align_rows;
  uint32_t dedup, expert_major, grouped;
  uint32_t n_chunks, tile_tokens, tiles_per_chunk;  // the last: of one origin
};

// In device memory, for those who read a routing there (moecclRoutingDeviceInfo_t).
struct TableCounts {
  uint64_t n_tokens, n_rows, n_unique;
};

// Launches: count, scan (blocks take counters), blocks, fill.
struct TablesKernelArgs {
  TableConstants is;
  const uint8_t* blocks;  // of all ranks
  uint64_t block_bytes, expert_at, weight_at;
  uint32_t weighted;
  // Counters [n_counters][tiles]; after the scan: what is before the tile. Per out edge rows sent and rows returned,
  // then the kinds of TableCounter, by the order of lists; then rows with a local choice, and choices of each local
  // expert, by that of Output.
  uint32_t* counter;
  uint32_t* total;        // [n_counters]
  uint32_t* chunk_first;  // [2 * n_out][n_chunks] and [n_sources][n_chunks]: counters where the chunk begins
  uint32_t* list_first;   // [n_out] in gather_src
  uint32_t *gather_src, *scatter_src, *scatter_dst, *padding;
  float *scatter_weight, *term_weight;
  uint64_t* offset;
  RowTermBits* term;
  WalkRowBlock* rows;
  WalkSumBlock *zeros, *sums;
  WalkTables* head;
  TableCounts* counts;
  int64_t* expert_offsets;  // [n_local + 1]
  int32_t* expert_counts;   // [n_local]
};
enum class TableCounter : uint32_t { kScattered, kArrived, kSums, kTerms, kKinds };

}  // namespace moeccl::cuda
