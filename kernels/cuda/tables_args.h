// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that make a routing's tables (walk_rows_args.h) on the device from all ranks' choices. They
// make what algo::RoutingTables makes from records on the host, list by list. Each rank gets every rank's kept choices
// (an AllGather of blocks) and picks those that pass through it, which it would otherwise have received as records.
//
// Tokens are cut into tiles, of one origin and one chunk each. A warp walks a tile, first to count and then, after
// prefix sums over the tiles, to write. The order of lists is (chunk, source, origin, token), and that of Output is
// (origin, token); each order has its own counters.
#pragma once

#include "kernels/cuda/walk_rows_args.h"

namespace moeccl::cuda {

inline constexpr uint16_t kNoExpert = 0xffff;

// The start of a rank's block. After it come, at offsets that all ranks know, expert [max_tokens][top_k] u16, with a
// token's kept choices first and in canonical order, then kNoExpert; and weight [max_tokens][top_k] float, at the same
// places.
struct TableBlock {
  uint32_t n_tokens, weighted;
  uint32_t wrong;        // TableFault
  uint32_t wrong_value;  // the token, or the number of tokens
};
enum class TableFault : uint32_t { kNone, kChoices, kTokens, kWeights };

// A rank's own part. take clears choices beyond the number of tokens; pack runs after route_order and route_drop.
struct TableOwnKernelArgs {
  const int32_t* topk;       // [n_tokens][top_k]
  const float* weight;       // same shape, or null
  const uint64_t* n_tokens;  // in device memory, or null: all of them
  uint64_t most_tokens;      // rows of topk
  uint32_t top_k;
  int32_t* choices;        // [most_tokens][top_k]
  uint32_t* bad;           // as in RouteOrderKernelArgs
  const uint32_t* key;     // [most_tokens][top_k]
  const uint32_t* expert;  // [positions]
  uint8_t* block;
  uint64_t expert_at, weight_at;  // byte offsets in the block
};

// The constants of one plan, which updates do not change. Sources and lists are numbered as in algo::RowLists. A place
// is one of the origins whose rows pass through this rank, in the order of sources.
struct TableConstants {
  const uint64_t* passes;       // [n_experts] bit o: choices of origin o pass through
  const int32_t* way;           // [n_experts] out edge, or algo::RankPaths::kHere
  const uint32_t* owner;        // [n_experts]
  const uint32_t* local_index;  // [n_experts] for local experts
  const uint32_t* level;  // [n_ranks][n_ranks] levels from the innermost to where two ranks differ: RowTerm::close
  const uint32_t* place_origin;  // [n_places]
  const uint32_t* place_source;  // [n_places]
  const uint32_t* place_order;   // [n_places] by origin
  const uint32_t* source_first;  // [n_sources + 1] places
  const uint32_t* first_out;     // [n_sources]
  const uint32_t* gather_first;  // [n_out + 1] lists
  const uint64_t* zeros;         // one more than there may be rows of padding
  uint32_t rank, n_ranks, n_experts, n_local, n_places, n_sources, n_out;
  uint32_t top_k, max_tokens, align_rows;
  uint32_t dedup, expert_major, grouped;
  uint32_t n_chunks, tile_tokens, tiles_per_chunk;  // the last is for one origin
};

// In device memory, for callers that read a routing there (moecclRoutingDeviceInfo_t).
struct TableCounts {
  uint64_t n_tokens, n_rows, n_unique;
};

// There are four launches: count, scan (blocks take counters), blocks, fill.
struct TablesKernelArgs {
  TableConstants is;
  const uint8_t* blocks;  // of all ranks
  uint64_t block_bytes, expert_at, weight_at;
  uint32_t weighted;
  // Counters [n_counters][tiles]; after the scan: the counts before the tile. For each out edge, rows sent and rows
  // returned, and then the kinds of TableCounter, all in the order of lists; then rows with a local choice, and choices
  // of each local expert, both in the order of Output.
  uint32_t* counter;
  uint32_t* total;        // [n_counters]
  uint32_t* chunk_first;  // [2 * n_out][n_chunks] and [n_sources][n_chunks]: counters at the start of the chunk
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
