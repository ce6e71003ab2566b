// SPDX-License-Identifier: Apache-2.0
// A routing's tables out of all ranks' choices, held to algo::RoutingTables list by list: see tables_args.h. The result
// does not depend on the order in which blocks or threads run.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/route_args.h"
#include "kernels/cuda/scan.cuh"
#include "kernels/cuda/tables_args.h"

namespace moeccl::cuda {

MOECCL_DEVICE uint64_t table_own_tokens(const TableOwnKernelArgs& a) {
  const uint64_t n = a.n_tokens != nullptr ? *a.n_tokens : a.most_tokens;
  return n < a.most_tokens ? n : a.most_tokens;
}

MOECCL_DEVICE void table_take(const TableOwnKernelArgs& a) {
  const Team team = whole_grid();
  const size_t kept = table_own_tokens(a) * a.top_k, n = a.most_tokens * a.top_k;
  if (team.thread == 0) *a.bad = ~0u;
  for (size_t i = team.thread; i < n; i += team.n_threads) a.choices[i] = i < kept ? a.topk[i] : -1;
}

// A block that is wrong has no choices: nobody follows them.
MOECCL_DEVICE void table_pack(const TableOwnKernelArgs& a) {
  const Team team = whole_grid();
  const uint64_t n = table_own_tokens(a);
  auto* expert = reinterpret_cast<uint16_t*>(a.block + a.expert_at);
  auto* weight = reinterpret_cast<float*>(a.block + a.weight_at);
  const bool too_many = a.n_tokens != nullptr && *a.n_tokens > a.most_tokens;
  const bool wrong = too_many || *a.bad != ~0u;
  if (team.thread == 0) {
    TableBlock head{};
    head.n_tokens = static_cast<uint32_t>(n);
    head.weighted = a.weight != nullptr ? 1 : 0;
    if (wrong) head.wrong = static_cast<uint32_t>(too_many ? TableFault::kTokens : TableFault::kChoices);
    if (wrong) head.wrong_value = too_many ? static_cast<uint32_t>(*a.n_tokens) : *a.bad;
    *reinterpret_cast<TableBlock*>(a.block) = head;
  }
  for (size_t token = team.thread; token < n; token += team.n_threads) {
    const size_t first = token * a.top_k;
    uint32_t kept = 0;
    for (uint32_t k = 0; k < a.top_k && !wrong; ++k) {
      const uint32_t key = a.key[first + k];
      if (key == kNoChoice) continue;
      expert[first + kept] = static_cast<uint16_t>(a.expert[key / kRouteChoices]);
      if (a.weight != nullptr) weight[first + kept] = a.weight[first + key % kRouteChoices];
      ++kept;
    }
    for (; kept < a.top_k; ++kept) expert[first + kept] = kNoExpert;
  }
}

MOECCL_DEVICE uint32_t table_tiles(const TableConstants& is) { return is.n_places * is.n_chunks * is.tiles_per_chunk; }
MOECCL_DEVICE uint32_t table_counter(const TableConstants& is, TableCounter kind) {
  return 2 * is.n_out + static_cast<uint32_t>(kind);
}
MOECCL_DEVICE uint32_t table_unique(const TableConstants& is) { return table_counter(is, TableCounter::kKinds); }
MOECCL_DEVICE uint32_t table_counters(const TableConstants& is) { return table_unique(is) + 1 + is.n_local; }

MOECCL_DEVICE const TableBlock& table_block(const TablesKernelArgs& a, uint32_t origin) {
  return *reinterpret_cast<const TableBlock*>(a.blocks + origin * a.block_bytes);
}
MOECCL_DEVICE uint64_t table_tokens(const TablesKernelArgs& a, uint32_t origin) {
  const uint32_t n = table_block(a, origin).n_tokens;
  return n < a.is.max_tokens ? n : a.is.max_tokens;
}
// The first token of a chunk: the least t with t * C / T >= chunk.
MOECCL_DEVICE uint64_t table_first_token(uint64_t chunk, uint64_t n_chunks, uint64_t n_tokens) {
  return (chunk * n_tokens + n_chunks - 1) / n_chunks;
}

// RoutingTables::Walk over one tile. The same pass counts and writes: a counter holds what is before the tile in the
// whole launch (zero when counting) and goes on by one.
template <bool kWrites>
struct TableWalk {
  const TablesKernelArgs& a;
  const TableConstants& is;
  uint32_t tile = 0, tile_of_output = 0, n_tiles = 0, chunk = 0, source = 0, origin = 0;
  bool own = false;
  const uint16_t* expert = nullptr;
  const float* weight = nullptr;
  uint32_t scattered = 0, arrived = 0, sums = 0, terms = 0;  // counters that every token moves
  uint32_t arrived_first = 0, last_owner = 0;
  bool sum_empty = true;

  MOECCL_DEVICE uint32_t& cell(uint32_t counter, uint32_t at) const {
    return a.counter[static_cast<size_t>(counter) * n_tiles + at];
  }
  MOECCL_DEVICE uint32_t& cell(TableCounter kind) const { return cell(table_counter(is, kind), tile); }
  MOECCL_DEVICE bool comes_by(uint32_t e) const { return e < is.n_experts && (is.passes[e] >> origin & 1) != 0; }
  MOECCL_DEVICE bool at_expert() const { return a.weighted != 0 && is.expert_major != 0; }

  MOECCL_DEVICE void begin() {
    if (!kWrites)
      for (uint32_t c = 0; c < table_counters(is); ++c) cell(c, c < table_unique(is) ? tile : tile_of_output) = 0;
    scattered = cell(TableCounter::kScattered);
    arrived = cell(TableCounter::kArrived);
    sums = cell(TableCounter::kSums);
    terms = cell(TableCounter::kTerms);
    arrived_first = kWrites ? a.chunk_first[static_cast<size_t>(2 * is.n_out + source) * is.n_chunks + chunk] : 0;
    last_owner = 0;
    sum_empty = true;
  }
  MOECCL_DEVICE void end() const {
    if (kWrites) return;
    cell(TableCounter::kScattered) = scattered;
    cell(TableCounter::kArrived) = arrived;
    cell(TableCounter::kSums) = sums;
    cell(TableCounter::kTerms) = terms;
  }

  MOECCL_DEVICE void begin_sum() {
    sum_empty = true;
    if (kWrites) a.offset[sums] = terms;
    ++sums;
  }
  MOECCL_DEVICE void term(uint32_t segment, uint32_t row, float w, uint32_t e) {
    if (kWrites) {
      const uint32_t owner = is.owner[e];
      if (!sum_empty && is.grouped != 0)
        a.term[terms - 1].close = static_cast<uint16_t>(is.level[last_owner * is.n_ranks + owner]);
      a.term[terms] = {row, static_cast<uint16_t>(segment), 0};
      if (at_expert()) a.term_weight[terms] = w;
      last_owner = owner;
    }
    sum_empty = false;
    ++terms;
  }
  MOECCL_DEVICE void scatter(uint32_t src, uint32_t dst, float w) {
    if (kWrites) {
      a.scatter_src[scattered] = src;
      a.scatter_dst[scattered] = dst;
      if (at_expert()) a.scatter_weight[scattered] = w;
    }
    ++scattered;
  }
  // The row's number in the slot of out edge j.
  MOECCL_DEVICE uint32_t gather(uint32_t j, uint32_t src) {
    const uint32_t at = cell(j, tile)++;
    if (!kWrites) return 0;
    a.gather_src[a.list_first[j] + at] = src;
    return at - a.chunk_first[static_cast<size_t>(j) * is.n_chunks + chunk];
  }
  MOECCL_DEVICE uint32_t returned(uint32_t j) {
    const uint32_t at = cell(is.n_out + j, tile)++;
    return kWrites ? at - a.chunk_first[static_cast<size_t>(is.n_out + j) * is.n_chunks + chunk] : 0;
  }
  // The row of Output of a local choice; *row: of the token's local choice before, in the layout of rows.
  MOECCL_DEVICE uint32_t local_row(uint32_t e, bool first, uint32_t row) {
    const uint32_t l = is.local_index[e], counter = table_unique(is) + 1 + l;
    const uint32_t unique = first ? cell(table_unique(is), tile_of_output)++ : row;
    const uint32_t among = cell(counter, tile_of_output)++;
    if (!kWrites || is.expert_major == 0) return unique;
    return static_cast<uint32_t>(a.expert_offsets[l]) + among;
  }
  MOECCL_DEVICE float weight_of(size_t i) const { return kWrites && a.weighted != 0 ? weight[i] : 1.0f; }

  // Whether any of a token's choices comes by; of own tokens all count.
  MOECCL_DEVICE bool has_record(size_t first) const {
    for (uint32_t k = 0; k < is.top_k && !own; ++k) {
      const uint32_t e = expert[first + k];
      if (e == kNoExpert) return false;
      if (comes_by(e)) return true;
    }
    return own;
  }

  MOECCL_DEVICE void merged(uint32_t token) {
    const size_t begin = static_cast<size_t>(token) * is.top_k;
    if (!has_record(begin)) return;
    const uint32_t row_in = own ? token : arrived++ - arrived_first, first_out = is.first_out[source];
    int32_t last = -2;
    uint32_t row = 0;
    bool local_before = false;
    begin_sum();
    for (uint32_t k = 0; k < is.top_k; ++k) {
      const uint32_t e = expert[begin + k];
      if (e == kNoExpert) break;
      if (!comes_by(e)) continue;
      const int32_t way = is.way[e];
      if (way < 0) {
        row = local_row(e, !local_before, row);
        local_before = true;
        const float w = weight_of(begin + k);
        if (is.expert_major != 0 || way != last) {
          scatter(row_in, row, w);
          term(0, row, w, e);
        }
      } else if (way != last) {
        const auto j = static_cast<uint32_t>(way);
        term(1 + j - first_out, gather(j, row_in), 1.0f, e);
      }
      last = way;
      last_owner = is.owner[e];
    }
  }

  MOECCL_DEVICE void single(uint32_t token) {
    const size_t begin = static_cast<size_t>(token) * is.top_k;
    const uint32_t first_out = is.first_out[source];
    uint32_t owner_before = ~0u, row_here = 0;
    bool local_before = false;
    if (own) begin_sum();
    for (uint32_t k = 0; k < is.top_k; ++k) {
      const uint32_t e = expert[begin + k];
      if (e == kNoExpert) break;
      if (!comes_by(e)) continue;
      const uint32_t owner = is.owner[e], row_in = own ? token : arrived++ - arrived_first;
      const bool kept = is.expert_major != 0 || owner != owner_before, here = is.way[e] < 0;
      owner_before = owner;
      const float w = own || here ? weight_of(begin + k) : 1.0f;
      uint32_t segment = 0, row = 0;
      if (here) {
        row = row_here = local_row(e, !local_before, row_here);
        local_before = true;
        if (kept) scatter(row_in, row, w);
      } else {
        const auto j = static_cast<uint32_t>(is.way[e]);
        (void)gather(j, row_in);
        segment = 1 + j - first_out;
        if (kept) row = returned(j);
      }
      if (!kept) continue;
      if (!own) begin_sum();
      term(segment, row, own ? w : 1.0f, e);
    }
  }

  MOECCL_DEVICE void run(uint32_t number) {
    const uint32_t per_chunk = is.n_places * is.tiles_per_chunk;
    tile = number;
    n_tiles = table_tiles(is);
    chunk = number / per_chunk;
    const uint32_t place = number % per_chunk / is.tiles_per_chunk, part = number % is.tiles_per_chunk;
    source = is.place_source[place];
    origin = is.place_origin[place];
    own = origin == is.rank;
    tile_of_output = (is.place_order[place] * is.n_chunks + chunk) * is.tiles_per_chunk + part;
    const uint8_t* block = a.blocks + origin * a.block_bytes;
    expert = reinterpret_cast<const uint16_t*>(block + a.expert_at);
    weight = reinterpret_cast<const float*>(block + a.weight_at);
    const uint64_t n = table_tokens(a, origin), chunk_end = table_first_token(chunk + 1, is.n_chunks, n);
    uint64_t token = table_first_token(chunk, is.n_chunks, n) + static_cast<uint64_t>(part) * is.tile_tokens;
    const uint64_t end = token + is.tile_tokens < chunk_end ? token + is.tile_tokens : chunk_end;
    begin();
    for (; token < end; ++token) {
      if (is.dedup != 0)
        merged(static_cast<uint32_t>(token));
      else
        single(static_cast<uint32_t>(token));
    }
    this->end();
  }
};

template <bool kWrites>
MOECCL_DEVICE void table_walk(const TablesKernelArgs& a) {
  const Team team = whole_grid();
  TableWalk<kWrites> walk{a, a.is};
  for (size_t tile = team.thread; tile < table_tiles(a.is); tile += team.n_threads)
    walk.run(static_cast<uint32_t>(tile));
}
MOECCL_DEVICE void table_count(const TablesKernelArgs& a) { table_walk<false>(a); }
MOECCL_DEVICE void table_fill(const TablesKernelArgs& a) { table_walk<true>(a); }

// A block for each counter: what is before each tile.
MOECCL_DEVICE void table_scan(const TablesKernelArgs& a) {
  MOECCL_SHARED uint32_t sums[kBlockThreads];
  const uint32_t t = thread_index(), n = block_threads(), n_tiles = table_tiles(a.is);
  for (uint32_t c = block_index(); c < table_counters(a.is); c += grid_blocks()) {
    uint32_t* row = a.counter + static_cast<size_t>(c) * n_tiles;
    uint32_t before = 0;
    for (uint32_t base = 0; base < n_tiles; base += n) {
      const uint32_t own = base + t < n_tiles ? row[base + t] : 0;
      block_prefix(sums, own);
      if (base + t < n_tiles) row[base + t] = before + sums[t] - own;
      before += sums[n - 1];
      block_sync();
    }
    if (t == 0) a.total[c] = before;
  }
}

MOECCL_DEVICE uint32_t table_before(const TablesKernelArgs& a, uint32_t counter, uint32_t tile) {
  const uint32_t n_tiles = table_tiles(a.is);
  return tile < n_tiles ? a.counter[static_cast<size_t>(counter) * n_tiles + tile] : a.total[counter];
}

// What a chunk's rows by one source are among, in each list: the tiles from `begin` on, to `end`.
struct TableSpan {
  uint32_t begin, end;
};
MOECCL_DEVICE TableSpan table_span(const TableConstants& is, uint32_t source, uint32_t chunk) {
  return {(chunk * is.n_places + is.source_first[source]) * is.tiles_per_chunk,
          (chunk * is.n_places + is.source_first[source + 1]) * is.tiles_per_chunk};
}

MOECCL_DEVICE void table_gather_blocks(const TablesKernelArgs& a, uint32_t source, uint32_t chunk) {
  const TableConstants& is = a.is;
  const TableSpan span = table_span(is, source, chunk);
  uint32_t list_first = 0;
  for (uint32_t j = 0; j < is.n_out; ++j) {
    const uint32_t first = table_before(a, j, span.begin);
    if (source < is.gather_first[j + 1] - is.gather_first[j]) {
      WalkRowBlock block{};
      block.src_index = a.gather_src + list_first + first;
      block.dst_first = first - table_before(a, j, table_span(is, 0, chunk).begin);
      block.count = table_before(a, j, span.end) - first;
      a.rows[static_cast<size_t>(is.gather_first[j] + source) * is.n_chunks + chunk] = block;
    }
    list_first += a.total[j];
  }
}

MOECCL_DEVICE void table_source_blocks(const TablesKernelArgs& a, uint32_t source, uint32_t chunk) {
  const TableConstants& is = a.is;
  const TableSpan span = table_span(is, source, chunk);
  const bool at_expert = a.weighted != 0 && is.expert_major != 0;
  const uint32_t scatters = table_counter(is, TableCounter::kScattered), sums = table_counter(is, TableCounter::kSums);
  const uint32_t first = table_before(a, scatters, span.begin), sum = table_before(a, sums, span.begin);
  WalkRowBlock rows{};
  rows.src_index = a.scatter_src + first;
  rows.dst_index = a.scatter_dst + first;
  rows.weights = at_expert ? a.scatter_weight + first : nullptr;
  rows.count = table_before(a, scatters, span.end) - first;
  a.rows[static_cast<size_t>(is.gather_first[is.n_out] + source) * is.n_chunks + chunk] = rows;
  WalkSumBlock block{};
  block.offsets = a.offset + sum;
  block.terms = a.term;
  block.weights = at_expert ? a.term_weight : nullptr;
  block.dst_first = source == 0 ? table_first_token(chunk, is.n_chunks, table_tokens(a, is.rank)) : 0;
  block.count = table_before(a, sums, span.end) - sum;
  a.sums[static_cast<size_t>(source) * is.n_chunks + chunk] = block;
  const uint32_t arrived = table_counter(is, TableCounter::kArrived);
  a.chunk_first[static_cast<size_t>(2 * is.n_out + source) * is.n_chunks + chunk] =
      table_before(a, arrived, span.begin);
}

// One block: where the experts' groups begin, their padding, and what the others read of the routing as a whole.
MOECCL_DEVICE void table_groups(const TablesKernelArgs& a) {
  MOECCL_SHARED uint32_t sums[kBlockThreads];
  const TableConstants& is = a.is;
  const uint32_t t = thread_index(), n = block_threads();
  uint32_t rows = 0, padded = 0;
  for (uint32_t base = 0; base < is.n_local; base += n) {
    const uint32_t l = base + t;
    const uint32_t count = l < is.n_local ? a.total[table_unique(is) + 1 + l] : 0;
    const uint32_t group = (count + is.align_rows - 1) / is.align_rows * is.align_rows, empty = group - count;
    block_prefix(sums, group);
    const uint32_t first = rows + sums[t] - group;
    rows += sums[n - 1];
    block_sync();
    block_prefix(sums, empty);
    uint32_t at = padded + sums[t] - empty;
    padded += sums[n - 1];
    block_sync();
    if (l >= is.n_local) continue;
    a.expert_counts[l] = static_cast<int32_t>(count);
    if (is.expert_major == 0) continue;
    a.expert_offsets[l] = first;
    for (uint32_t row = first + count; row < first + group; ++row) a.padding[at++] = row;
  }
  if (t != 0) return;
  if (is.expert_major != 0) a.expert_offsets[is.n_local] = rows;
  *a.counts = {table_tokens(a, is.rank), is.expert_major != 0 ? rows : a.total[table_unique(is)],
               a.total[table_unique(is)]};
  a.offset[a.total[table_counter(is, TableCounter::kSums)]] = a.total[table_counter(is, TableCounter::kTerms)];
  WalkTables head{};
  head.ready = 1;
  for (uint32_t r = is.n_ranks; r-- > 0;) {
    const TableBlock& block = table_block(a, r);
    uint32_t fault = block.wrong, value = block.wrong_value;
    if (fault == 0 && block.weighted != a.weighted) fault = static_cast<uint32_t>(TableFault::kWeights), value = r;
    if (fault == 0) continue;
    head.ready = 0;
    head.fault = fault, head.fault_rank = r, head.fault_value = value;
  }
  head.n_chunks = is.n_chunks;
  head.rows = a.rows;
  head.zeros = a.zeros;
  head.sums = a.sums;
  *a.head = head;
  WalkSumBlock zeros{};
  if (is.expert_major != 0) {
    zeros.offsets = is.zeros;
    zeros.dst_index = a.padding;
    zeros.count = padded;
  }
  for (uint32_t c = 0; c < is.n_chunks; ++c) a.zeros[c] = c == 0 ? zeros : WalkSumBlock{};
}

MOECCL_DEVICE void table_blocks(const TablesKernelArgs& a) {
  const TableConstants& is = a.is;
  const Team team = whole_grid();
  if (block_index() == 0) table_groups(a);
  const size_t n = static_cast<size_t>(is.n_sources) * is.n_chunks;
  for (size_t i = team.thread; i < n; i += team.n_threads) {
    const auto source = static_cast<uint32_t>(i / is.n_chunks), chunk = static_cast<uint32_t>(i % is.n_chunks);
    table_gather_blocks(a, source, chunk);
    table_source_blocks(a, source, chunk);
  }
  const size_t edges = static_cast<size_t>(2 * is.n_out) * is.n_chunks;
  for (size_t i = team.thread; i < edges; i += team.n_threads)
    a.chunk_first[i] = table_before(a, static_cast<uint32_t>(i / is.n_chunks),
                                    table_span(is, 0, static_cast<uint32_t>(i % is.n_chunks)).begin);
  for (size_t j = team.thread; j < is.n_out; j += team.n_threads) {
    uint32_t first = 0;
    for (size_t other = 0; other < j; ++other) first += a.total[other];
    a.list_first[j] = first;
  }
}

}  // namespace moeccl::cuda
