// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/tables/table_plan.h"

#include <algorithm>
#include <cstring>

#include "src/algo/moe_plan.h"

namespace moeccl::exec {

using namespace moeccl::cuda;

namespace {

// A warp walks a tile. Small tiles mean many warps, but each tile needs a counter for each list.
constexpr uint32_t kLeastTile = 16;
constexpr uint64_t kMostCounters = 4u << 20;

uint64_t copies_of(const algo::MoeShape& shape, const algo::Paths& paths) {
  return paths.algorithm().dedup() ? 1 : shape.top_k;
}

}  // namespace

uint32_t TablePlan::n_chunks_of(const algo::MoeShape& shape, const algo::Paths& paths, uint64_t slot_rows) {
  const uint64_t tokens = std::max<uint64_t>(shape.max_tokens, 1);
  const uint64_t copies = copies_of(shape, paths);
  const auto fits = [&](uint64_t chunk_tokens) {
    for (uint32_t h = 0; h < paths.n_hops(); ++h)
      if (chunk_tokens * paths.max_origins(h) * copies > paths.widths().rows(h, slot_rows)) return false;
    return true;
  };
  uint64_t n_chunks = 1;
  while (n_chunks < tokens && !fits((tokens + n_chunks - 1) / n_chunks)) n_chunks *= 2;
  const uint32_t overlap = algo::moe_pipeline_chunks(tokens * paths.max_origins() * copies * shape.row_bytes);
  return std::max(static_cast<uint32_t>(n_chunks), overlap);
}

TablePlan::TablePlan(const Layer& setting) : s_(setting) {
  const algo::RankPaths& p = *s_.rank;
  is_.rank = p.rank;
  is_.n_ranks = s_.paths->n_ranks();
  is_.n_experts = p.placement.n_experts();
  is_.n_local = p.placement.n_local(p.rank);
  is_.n_sources = 1 + p.lists.n_in;
  is_.n_out = static_cast<uint32_t>(p.edges.out.size());
  is_.top_k = s_.shape->top_k;
  is_.max_tokens = static_cast<uint32_t>(s_.shape->max_tokens);
  is_.align_rows = s_.shape->align_rows;
  is_.dedup = p.algorithm.dedup() ? 1 : 0;
  is_.expert_major = s_.shape->expert_major ? 1 : 0;
  is_.grouped = s_.shape->grouped ? 1 : 0;
  is_.n_chunks = s_.n_chunks > 0 ? s_.n_chunks : n_chunks_of(*s_.shape, *s_.paths, s_.slot_rows);
  lay_out_constants();
  lay_out_own();
  lay_out_tables();
}

size_t TablePlan::take(size_t bytes) {
  const size_t at = end_;
  end_ += (bytes + 255) / 256 * 256;
  return at;
}

template <class T, class... Others>
void TablePlan::place(size_t n, T*& field, Others*&... others) {
  field = reinterpret_cast<T*>(take(n * sizeof(T)));
  ((others = field), ...);
  const auto note = [&](const void* at) {
    fields_.push_back(static_cast<size_t>(static_cast<const std::byte*>(at) - reinterpret_cast<std::byte*>(&args_)));
  };
  note(&field);
  (note(&others), ...);
}

template <class T, class... Others>
void TablePlan::constant(const std::vector<T>& values, const T*& field, Others*&... others) {
  const size_t from = end_;
  place(values.size(), field, others...);
  constants_.resize(end_);
  if (!values.empty()) std::memcpy(constants_.data() + from, values.data(), values.size() * sizeof(T));
}

TablePlan::Args TablePlan::at(std::byte* base) const {
  Args args = args_;
  for (const size_t field : fields_) {
    std::byte* place = nullptr;
    std::byte* const pointer = reinterpret_cast<std::byte*>(&args) + field;
    std::memcpy(&place, pointer, sizeof(place));
    place = base + reinterpret_cast<size_t>(place);
    std::memcpy(pointer, &place, sizeof(place));
  }
  return args;
}

// Returns for each expert a bit per origin: whether this rank handles that origin's choices of the expert.
std::vector<uint64_t> TablePlan::passes() const {
  const uint32_t n = is_.n_ranks;
  std::vector<uint64_t> by_expert(is_.n_experts, uint64_t{1} << is_.rank);
  for (uint32_t origin = 0; origin < n; ++origin) {
    if (origin == is_.rank) continue;
    const algo::Placement seen = s_.domains == nullptr ? *s_.home : s_.domains->seen_from(origin, *s_.home);
    std::vector<bool> comes(n, false);  // by the expert's owner
    for (uint32_t x = 0; x < n; ++x)
      for (uint32_t at = origin; at != x && seen.n_local(x) > 0 && !comes[x];)
        comes[x] = (at = s_.paths->next(at, x)) == is_.rank;
    for (uint32_t e = 0; e < is_.n_experts; ++e)
      if (comes[seen.owner[e]]) by_expert[e] |= uint64_t{1} << origin;
  }
  for (uint32_t e = 0; e < is_.n_experts; ++e)
    if (s_.rank->way[e] == algo::RankPaths::kNowhere) by_expert[e] = 0;
  return by_expert;
}

void TablePlan::lay_out_constants() {
  const algo::RankPaths& p = *s_.rank;
  const uint32_t n = is_.n_ranks;
  constant(passes(), is_.passes);
  constant(p.way, is_.way);
  constant(p.placement.owner, is_.owner);
  constant(p.placement.local_index, is_.local_index);
  std::vector<uint32_t> level(size_t{n} * n);
  for (uint32_t a = 0; a < n; ++a)
    for (uint32_t b = 0; b < n; ++b) level[size_t{a} * n + b] = p.tree.depth() - p.tree.level_between(a, b);
  constant(level, is_.level);
  std::vector<uint32_t> origin{p.rank}, source{0}, first{0, 1};
  for (uint32_t i = 0; i < p.edges.in.size(); ++i) {
    for (const uint32_t o : p.edges.in[i].origins) origin.push_back(o), source.push_back(1 + i);
    first.push_back(static_cast<uint32_t>(origin.size()));
  }
  std::vector<uint32_t> order(origin.size());
  for (size_t i = 0; i < origin.size(); ++i)
    order[i] =
        static_cast<uint32_t>(std::count_if(origin.begin(), origin.end(), [&](uint32_t o) { return o < origin[i]; }));
  is_.n_places = static_cast<uint32_t>(origin.size());
  constant(origin, is_.place_origin);
  constant(source, is_.place_source);
  constant(order, is_.place_order);
  constant(first, is_.source_first);
  constant(p.lists.first_out, is_.first_out);
  constant(p.lists.gather_first, is_.gather_first);
  const size_t padding = is_.expert_major != 0 ? size_t{is_.n_local} * (is_.align_rows - 1) : 0;
  constant(std::vector<uint64_t>(padding + 1, 0), is_.zeros);
  constant(s_.order->position, args_.order.position, args_.drop.position);
  constant(std::vector<uint32_t>(s_.order->expert.begin(), s_.order->expert.end()), args_.own.expert);
}

void TablePlan::lay_out_own() {
  auto& [own, order, lists, drop, tables] = args_;
  const size_t tokens = is_.max_tokens, choices = tokens * is_.top_k;
  own.top_k = order.top_k = lists.top_k = drop.top_k = is_.top_k;
  order.n_experts = lists.n_experts = drop.n_experts = is_.n_experts;
  drop.capacity = s_.shape->capacity;
  place(choices, own.choices, order.topk, lists.topk);
  place(choices, drop.key, order.key, own.key);
  place(1, own.bad, order.bad);
  if (s_.shape->capacity > 0) {
    place((tokens + kRouteTile - 1) / kRouteTile * is_.n_experts, lists.tile_count);
    place(size_t{is_.n_experts} + 1, lists.first, drop.first);
    place(choices, lists.list, drop.list);
    place(is_.n_experts, drop.drop_counts);
  }
  const auto aligned = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
  own.expert_at = tables.expert_at = aligned(sizeof(TableBlock));
  own.weight_at = tables.weight_at = own.expert_at + aligned(choices * sizeof(uint16_t));
  tables.block_bytes = block_bytes_ = own.weight_at + aligned(choices * sizeof(float));
  own_block_ = end_;
  place(block_bytes_, own.block);
  blocks_ = end_;
  place(block_bytes_ * is_.n_ranks, tables.blocks);
}

// A choice that passes through is at most one gathered row, one scattered row, one term and one sum; an own token is
// one sum.
void TablePlan::lay_out_tables() {
  const uint64_t chunk_tokens = (uint64_t{is_.max_tokens} + is_.n_chunks - 1) / is_.n_chunks;
  for (is_.tile_tokens = kLeastTile;; is_.tile_tokens *= 2) {
    is_.tiles_per_chunk =
        static_cast<uint32_t>(std::max<uint64_t>(1, (chunk_tokens + is_.tile_tokens - 1) / is_.tile_tokens));
    if (is_.tiles_per_chunk == 1 || uint64_t{n_tiles()} * n_counters() <= kMostCounters) break;
  }
  TablesKernelArgs& a = args_.tables;
  place(size_t{n_tiles()} * n_counters(), a.counter);
  place(n_counters(), a.total);
  place((2 * size_t{is_.n_out} + is_.n_sources) * is_.n_chunks, a.chunk_first);
  place(is_.n_out, a.list_first);
  const size_t choices = size_t{is_.n_places} * is_.max_tokens * is_.top_k;
  place(choices, a.gather_src);
  place(choices, a.scatter_src);
  place(choices, a.scatter_dst);
  place(choices, a.scatter_weight);
  place(choices, a.term);
  place(choices, a.term_weight);
  place(choices + is_.max_tokens + 1, a.offset);
  place(is_.expert_major != 0 ? size_t{is_.n_local} * (is_.align_rows - 1) : 0, a.padding);
  place(size_t{s_.rank->lists.n_rows()} * is_.n_chunks, a.rows);
  place(is_.n_chunks, a.zeros);
  place(size_t{is_.n_sources} * is_.n_chunks, a.sums);
}

RouteOrderKernelArgs TablePlan::order(std::byte* base, uint32_t n_tokens) const {
  RouteOrderKernelArgs a = at(base).order;
  a.n_tokens = n_tokens;
  return a;
}

RouteKernelArgs TablePlan::lists(std::byte* base, uint32_t n_tokens) const {
  RouteKernelArgs a = at(base).lists;
  a.n_tokens = n_tokens;
  a.n_tiles = (n_tokens + kRouteTile - 1) / kRouteTile;
  return a;
}

}  // namespace moeccl::exec
