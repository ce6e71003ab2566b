// SPDX-License-Identifier: Apache-2.0
// Makes a routing's tables from all ranks' choices, equal to algo::RoutingTables list by list: see tables_args.h. The
// result does not depend on the order in which blocks or threads run.
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

// A block with a fault has no choices, so no rank follows them.
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
// Returns the first token of a chunk: the least t with t * C / T >= chunk.
MOECCL_DEVICE uint64_t table_first_token(uint64_t chunk, uint64_t n_chunks, uint64_t n_tokens) {
  return (chunk * n_tokens + n_chunks - 1) / n_chunks;
}

// Runs RoutingTables::Walk over one tile, by a warp. Each lane takes a choice, in the order of tokens and choices, so
// that a ballot gives what a round adds to a list, and the lanes before give a row's place in it. The same pass counts
// and writes: a counter holds what precedes the tile in the whole launch (zero when counting) and advances by what a
// round adds.
template <bool kWrites>
struct TableWalk {
  const TablesKernelArgs& a;
  const TableConstants& is;
  uint32_t lane;
  uint32_t tile = 0, tile_of_output = 0, n_tiles = 0, chunk = 0, source = 0, origin = 0;
  bool own = false;
  const uint16_t* expert = nullptr;
  const float* weight = nullptr;
  uint32_t scattered = 0, arrived = 0, sums = 0, terms = 0, unique = 0;  // counters that every token advances
  uint32_t arrived_first = 0;
  // For a token that takes several rounds: its last choice so far that passes through, and whether one is local.
  bool has_last = false, has_local = false;
  int32_t last_way = 0;
  uint32_t last_owner = 0;

  // A choice, with what passes through of it and of the token's previous choice.
  struct Choice {
    uint32_t token = 0, e = 0, owner = 0, before_owner = 0;
    int32_t way = 0, before_way = 0;
    bool by = false, before = false, local_before = false;
    float w = 1.0f;
  };

  MOECCL_DEVICE uint32_t& cell(uint32_t counter, uint32_t at) const {
    return a.counter[static_cast<size_t>(counter) * n_tiles + at];
  }
  MOECCL_DEVICE uint32_t& cell(TableCounter kind) const { return cell(table_counter(is, kind), tile); }
  MOECCL_DEVICE bool comes_by(uint32_t e) const { return e < is.n_experts && (is.passes[e] >> origin & 1) != 0; }
  MOECCL_DEVICE bool at_expert() const { return a.weighted != 0 && is.expert_major != 0; }
  MOECCL_DEVICE uint32_t lanes_before() const { return (1u << lane) - 1; }
  MOECCL_DEVICE uint32_t before(uint32_t lanes) const { return count_bits(lanes & lanes_before()); }

  MOECCL_DEVICE void begin() {
    if (!kWrites) {
      for (uint32_t c = lane; c < table_counters(is); c += kWarp)
        cell(c, c < table_unique(is) ? tile : tile_of_output) = 0;
      scattered = arrived = sums = terms = unique = 0;
      warp_sync();
      return;
    }
    scattered = cell(TableCounter::kScattered);
    arrived = cell(TableCounter::kArrived);
    sums = cell(TableCounter::kSums);
    terms = cell(TableCounter::kTerms);
    unique = cell(table_unique(is), tile_of_output);
    arrived_first = a.chunk_first[static_cast<size_t>(2 * is.n_out + source) * is.n_chunks + chunk];
  }
  MOECCL_DEVICE void end() const {
    if (kWrites || lane != 0) return;
    cell(TableCounter::kScattered) = scattered;
    cell(TableCounter::kArrived) = arrived;
    cell(TableCounter::kSums) = sums;
    cell(TableCounter::kTerms) = terms;
    cell(table_unique(is), tile_of_output) = unique;
  }

  // Returns the place of each participating lane in the list of its counter, and advances the counter.
  MOECCL_DEVICE uint32_t count(bool takes_part, uint32_t counter, uint32_t at) const {
    const uint32_t alike = match(takes_part ? counter : ~0u);
    const uint32_t first = takes_part ? cell(counter, at) : 0;
    warp_sync();  // all lanes have read it
    if (takes_part && before(alike) == 0) cell(counter, at) = first + count_bits(alike);
    warp_sync();
    return first + before(alike);
  }
  MOECCL_DEVICE uint32_t in_chunk(uint32_t place, uint32_t counter) const {
    return kWrites ? place - a.chunk_first[static_cast<size_t>(counter) * is.n_chunks + chunk] : 0;
  }

  // Reads the lane's choice, which is k of `token`; `of_token` are the lanes with choices of that token. `first_round`
  // is that of the token.
  MOECCL_DEVICE Choice read(bool active, uint32_t token, uint32_t k, uint32_t of_token, bool first_round) const {
    Choice c;
    c.token = token;
    const size_t i = static_cast<size_t>(token) * is.top_k + k;
    c.e = active ? expert[i] : kNoExpert;
    c.by = comes_by(c.e);
    if (c.by) {
      c.way = is.way[c.e];
      c.owner = is.owner[c.e];
      if (kWrites && a.weighted != 0) c.w = weight[i];
    }
    const uint32_t earlier = ballot(c.by) & of_token & lanes_before();
    const uint32_t from = earlier == 0 ? lane : kWarp - 1 - leading_zeros(earlier);
    c.before_way = shuffle(c.way, from);
    c.before_owner = shuffle(c.owner, from);
    c.before = earlier != 0;
    if (!c.before && !first_round) {
      c.before = has_last;
      c.before_way = last_way;
      c.before_owner = last_owner;
    }
    c.local_before = (ballot(c.by && c.way < 0) & of_token & lanes_before()) != 0 || (!first_round && has_local);
    return c;
  }

  // Advances the lists of Output for a local choice, and returns its row in the layout of rows or of experts.
  MOECCL_DEVICE uint32_t local_row(bool local, const Choice& c) {
    const uint32_t firsts = ballot(local && !c.local_before);
    const uint32_t row = unique + before(firsts) - (c.local_before ? 1 : 0);
    unique += count_bits(firsts);
    const uint32_t l = local ? is.local_index[c.e] : 0;
    const uint32_t among = count(local, table_unique(is) + 1 + l, tile_of_output);
    if (!kWrites || !local || is.expert_major == 0) return row;
    return static_cast<uint32_t>(a.expert_offsets[l]) + among;
  }

  // Runs one round. `leads` is set where a token begins.
  MOECCL_DEVICE void round(const Choice& c, bool leads) {
    const bool merged = is.dedup != 0, local = c.by && c.way < 0, out = c.by && c.way >= 0;
    const bool other = merged ? !c.before || c.before_way != c.way : !c.before || c.before_owner != c.owner;
    const bool kept = c.by && (other || (is.expert_major != 0 && (local || !merged)));
    const bool gathers = out && (kept || !merged);
    // Rows that arrive, and sums: one for each token, or one for each choice.
    const uint32_t arrivals = ballot(c.by && !own && (!merged || !c.before));
    const uint32_t row_in =
        own ? c.token : arrived - arrived_first + count_bits(arrivals & (lanes_before() | 1u << lane)) - 1;
    arrived += count_bits(arrivals);
    const bool begins = own ? leads : merged ? c.by && !c.before : kept;
    const uint32_t kept_lanes = ballot(kept), sum_lanes = ballot(begins);
    const uint32_t term = terms + before(kept_lanes);
    if (kWrites && begins) a.offset[sums + before(sum_lanes)] = term;
    sums += count_bits(sum_lanes);
    terms += count_bits(kept_lanes);

    uint32_t row = local_row(local, c), segment = 0;
    const uint32_t scatters = ballot(local && kept), j = out ? static_cast<uint32_t>(c.way) : 0;
    if (kWrites && local && kept) {
      const uint32_t at = scattered + before(scatters);
      a.scatter_src[at] = row_in;
      a.scatter_dst[at] = row;
      if (at_expert()) a.scatter_weight[at] = c.w;
    }
    scattered += count_bits(scatters);
    const uint32_t place = count(gathers, j, tile);
    if (kWrites && gathers) a.gather_src[a.list_first[j] + place] = row_in;
    const uint32_t returned = merged ? place : count(out && kept, is.n_out + j, tile);
    if (out) {
      segment = 1 + j - is.first_out[source];
      row = in_chunk(returned, merged ? j : is.n_out + j);
    }
    if (!kWrites) return;
    if (kept) {
      a.term[term] = {row, static_cast<uint16_t>(segment), 0};
      if (at_expert()) a.term_weight[term] = (merged ? local : own) ? c.w : 1.0f;
    }
    warp_sync();  // the next term of a sum sets how many groups the previous one closes
    if (kept && c.before && is.grouped != 0 && (merged || own))
      a.term[term - 1].close = static_cast<uint16_t>(is.level[c.before_owner * is.n_ranks + c.owner]);
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
    const uint64_t token = table_first_token(chunk, is.n_chunks, n) + static_cast<uint64_t>(part) * is.tile_tokens;
    const uint64_t end = token + is.tile_tokens < chunk_end ? token + is.tile_tokens : chunk_end;
    begin();
    // `width` lanes per token, `at_once` tokens per round; a token with more choices than lanes takes several rounds.
    const uint32_t width = is.top_k < kWarp ? is.top_k : kWarp, at_once = kWarp / width;
    const uint32_t in_round = lane / width, of_token = (width == kWarp ? ~0u : (1u << width) - 1) << in_round * width;
    for (uint64_t first = token; first < end; first += at_once) {
      for (uint32_t k = 0; k < is.top_k; k += kWarp) {
        const bool active = in_round < at_once && first + in_round < end && k + lane % width < is.top_k;
        const Choice c = read(active, static_cast<uint32_t>(first) + in_round, k + lane % width, of_token, k == 0);
        round(c, active && k == 0 && lane % width == 0);
        if (is.top_k > kWarp) keep(c, k == 0);
      }
    }
    this->end();
  }

  // Keeps state for the token's next round.
  MOECCL_DEVICE void keep(const Choice& c, bool first_round) {
    const uint32_t by = ballot(c.by), local = ballot(c.by && c.way < 0);
    const uint32_t from = by == 0 ? 0 : kWarp - 1 - leading_zeros(by);
    const int32_t way = shuffle(c.way, from);
    const uint32_t owner = shuffle(c.owner, from);
    has_local = local != 0 || (!first_round && has_local);
    has_last = by != 0 || (!first_round && has_last);
    if (by == 0) return;
    last_way = way;
    last_owner = owner;
  }
};

template <bool kWrites>
MOECCL_DEVICE void table_walk(const TablesKernelArgs& a) {
  const Team team = whole_grid();
  TableWalk<kWrites> walk{a, a.is, team.lane()};
  for (size_t tile = team.warp(); tile < table_tiles(a.is); tile += team.n_warps())
    walk.run(static_cast<uint32_t>(tile));
}
MOECCL_DEVICE void table_count(const TablesKernelArgs& a) { table_walk<false>(a); }
MOECCL_DEVICE void table_fill(const TablesKernelArgs& a) { table_walk<true>(a); }

// One block for each counter: computes what precedes each tile.
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

// The range of tiles, in each list, that holds a chunk's rows by one source: from `begin` to `end`.
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

// Runs in one block: computes where the experts' groups begin, their padding, and the data of the whole routing.
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
