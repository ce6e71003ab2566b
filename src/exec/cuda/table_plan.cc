#include "src/exec/cuda/table_plan.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "src/algo/moe_plan.h"

namespace moeccl::exec {

using namespace moeccl::cuda;

namespace {

// A thread walks a tile: few tokens are many threads, but each tile costs a counter of each list.
constexpr uint32_t kLeastTile = 8;
constexpr uint64_t kMostCounters = 4u << 20;

uint64_t copies_of(const algo::MoeShape& shape, const algo::Paths& paths) {
  return paths.algorithm().dedup() ? 1 : shape.top_k;
}

}  // namespace

uint32_t TablePlan::n_chunks_of(const algo::MoeShape& shape, const algo::Paths& paths, uint64_t slot_rows) {
  const uint64_t tokens = std::max<uint64_t>(shape.max_tokens, 1);
  const uint64_t rows_of_token = paths.max_origins() * copies_of(shape, paths);
  uint64_t n_chunks = 1;
  while (n_chunks < tokens && (tokens + n_chunks - 1) / n_chunks * rows_of_token > slot_rows) n_chunks *= 2;
  const uint32_t overlap = algo::moe_pipeline_chunks(tokens * rows_of_token * shape.row_bytes);
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

template <class T>
size_t TablePlan::constant(const std::vector<T>& values) {
  const size_t at = take(values.size() * sizeof(T));
  constants_.resize(end_);
  if (!values.empty()) std::memcpy(constants_.data() + at, values.data(), values.size() * sizeof(T));
  return at;
}

// By expert, one bit for each origin whose choices of it this rank handles.
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
  passes_ = constant(passes());
  way_ = constant(p.way);
  owner_ = constant(p.placement.owner);
  local_index_ = constant(p.placement.local_index);
  std::vector<uint32_t> level(size_t{n} * n);
  for (uint32_t a = 0; a < n; ++a)
    for (uint32_t b = 0; b < n; ++b) level[size_t{a} * n + b] = p.tree.depth() - p.tree.level_between(a, b);
  level_ = constant(level);
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
  place_origin_ = constant(origin);
  place_source_ = constant(source);
  place_order_ = constant(order);
  source_first_ = constant(first);
  first_out_ = constant(p.lists.first_out);
  gather_first_ = constant(p.lists.gather_first);
  const size_t padding = is_.expert_major != 0 ? size_t{is_.n_local} * (is_.align_rows - 1) : 0;
  zeros_of_ = constant(std::vector<uint64_t>(padding + 1, 0));
  position_ = constant(s_.order->position);
  expert_ = constant(std::vector<uint32_t>(s_.order->expert.begin(), s_.order->expert.end()));
  std::vector<uint32_t> identity(s_.shape->capacity > 0 ? is_.n_experts : 0);
  std::iota(identity.begin(), identity.end(), 0);
  identity_ = constant(identity);
}

void TablePlan::lay_out_own() {
  const size_t tokens = is_.max_tokens, choices = tokens * is_.top_k;
  choices_ = take(choices * sizeof(int32_t));
  key_ = take(choices * sizeof(uint32_t));
  bad_ = take(sizeof(uint32_t));
  if (s_.shape->capacity > 0) {
    drop_tile_ = take((tokens + kRouteTile - 1) / kRouteTile * is_.n_experts * sizeof(uint32_t));
    drop_first_ = take((size_t{is_.n_experts} + 1) * sizeof(uint32_t));
    drop_list_ = take(choices * sizeof(uint32_t));
    drop_counts_ = take(is_.n_experts * sizeof(int32_t));
  }
  const auto aligned = [](size_t bytes) { return (bytes + 15) / 16 * 16; };
  expert_at_ = aligned(sizeof(TableBlock));
  weight_at_ = expert_at_ + aligned(choices * sizeof(uint16_t));
  block_bytes_ = weight_at_ + aligned(choices * sizeof(float));
  own_block_ = take(block_bytes_);
  blocks_ = take(block_bytes_ * is_.n_ranks);
}

// A choice that comes by is at most one gathered row, one scattered row, one term and one sum; an own token one sum.
void TablePlan::lay_out_tables() {
  const uint64_t chunk_tokens = (uint64_t{is_.max_tokens} + is_.n_chunks - 1) / is_.n_chunks;
  for (is_.tile_tokens = kLeastTile;; is_.tile_tokens *= 2) {
    is_.tiles_per_chunk =
        static_cast<uint32_t>(std::max<uint64_t>(1, (chunk_tokens + is_.tile_tokens - 1) / is_.tile_tokens));
    if (is_.tiles_per_chunk == 1 || uint64_t{n_tiles()} * n_counters() <= kMostCounters) break;
  }
  counter_ = take(size_t{n_tiles()} * n_counters() * sizeof(uint32_t));
  total_ = take(n_counters() * sizeof(uint32_t));
  chunk_first_ = take((2 * size_t{is_.n_out} + is_.n_sources) * is_.n_chunks * sizeof(uint32_t));
  list_first_ = take(is_.n_out * sizeof(uint32_t));
  const size_t choices = size_t{is_.n_places} * is_.max_tokens * is_.top_k;
  gather_src_ = take(choices * sizeof(uint32_t));
  scatter_src_ = take(choices * sizeof(uint32_t));
  scatter_dst_ = take(choices * sizeof(uint32_t));
  scatter_weight_ = take(choices * sizeof(float));
  term_ = take(choices * sizeof(RowTermBits));
  term_weight_ = take(choices * sizeof(float));
  offset_ = take((choices + is_.max_tokens + 1) * sizeof(uint64_t));
  padding_ = take(is_.expert_major != 0 ? size_t{is_.n_local} * (is_.align_rows - 1) * sizeof(uint32_t) : 0);
  rows_ = take(size_t{s_.rank->lists.n_rows()} * is_.n_chunks * sizeof(WalkRowBlock));
  zeros_ = take(size_t{is_.n_chunks} * sizeof(WalkSumBlock));
  sums_ = take(size_t{is_.n_sources} * is_.n_chunks * sizeof(WalkSumBlock));
}

namespace {

template <class T>
T* at(std::byte* base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

TableOwnKernelArgs TablePlan::own(std::byte* base) const {
  TableOwnKernelArgs a{};
  a.top_k = is_.top_k;
  a.choices = at<int32_t>(base, choices_);
  a.bad = at<uint32_t>(base, bad_);
  a.key = at<uint32_t>(base, key_);
  a.expert = at<uint32_t>(base, expert_);
  a.block = at<uint8_t>(base, own_block_);
  a.expert_at = expert_at_;
  a.weight_at = weight_at_;
  return a;
}

RouteOrderKernelArgs TablePlan::order(std::byte* base, uint32_t n_tokens) const {
  return {at<int32_t>(base, choices_), at<uint32_t>(base, position_), n_tokens, is_.top_k, is_.n_experts,
          at<uint32_t>(base, key_),    at<uint32_t>(base, bad_)};
}

RouteKernelArgs TablePlan::lists(std::byte* base, uint32_t n_tokens) const {
  RouteKernelArgs a{};
  a.topk = at<int32_t>(base, choices_);
  a.map = at<int32_t>(base, identity_);
  a.n_tokens = n_tokens;
  a.top_k = is_.top_k;
  a.n_experts = a.n_slots = is_.n_experts;
  a.n_maps = 1;
  a.n_tiles = (n_tokens + kRouteTile - 1) / kRouteTile;
  a.tile_count = at<uint32_t>(base, drop_tile_);
  a.first = at<uint32_t>(base, drop_first_);
  a.list = at<uint32_t>(base, drop_list_);
  a.bad = at<uint32_t>(base, bad_);
  return a;
}

RouteDropKernelArgs TablePlan::drop(std::byte* base) const {
  return {at<uint32_t>(base, drop_first_),
          at<uint32_t>(base, drop_list_),
          at<uint32_t>(base, position_),
          is_.n_experts,
          is_.top_k,
          s_.shape->capacity,
          at<uint32_t>(base, key_),
          at<int32_t>(base, drop_counts_)};
}

TablesKernelArgs TablePlan::tables(std::byte* base) const {
  TablesKernelArgs a{};
  a.is = is_;
  a.is.passes = at<uint64_t>(base, passes_);
  a.is.way = at<int32_t>(base, way_);
  a.is.owner = at<uint32_t>(base, owner_);
  a.is.local_index = at<uint32_t>(base, local_index_);
  a.is.level = at<uint32_t>(base, level_);
  a.is.place_origin = at<uint32_t>(base, place_origin_);
  a.is.place_source = at<uint32_t>(base, place_source_);
  a.is.place_order = at<uint32_t>(base, place_order_);
  a.is.source_first = at<uint32_t>(base, source_first_);
  a.is.first_out = at<uint32_t>(base, first_out_);
  a.is.gather_first = at<uint32_t>(base, gather_first_);
  a.is.zeros = at<uint64_t>(base, zeros_of_);
  a.blocks = at<uint8_t>(base, blocks_);
  a.block_bytes = block_bytes_;
  a.expert_at = expert_at_;
  a.weight_at = weight_at_;
  a.counter = at<uint32_t>(base, counter_);
  a.total = at<uint32_t>(base, total_);
  a.chunk_first = at<uint32_t>(base, chunk_first_);
  a.list_first = at<uint32_t>(base, list_first_);
  a.gather_src = at<uint32_t>(base, gather_src_);
  a.scatter_src = at<uint32_t>(base, scatter_src_);
  a.scatter_dst = at<uint32_t>(base, scatter_dst_);
  a.scatter_weight = at<float>(base, scatter_weight_);
  a.padding = at<uint32_t>(base, padding_);
  a.term_weight = at<float>(base, term_weight_);
  a.offset = at<uint64_t>(base, offset_);
  a.term = at<RowTermBits>(base, term_);
  a.rows = at<WalkRowBlock>(base, rows_);
  a.zeros = at<WalkSumBlock>(base, zeros_);
  a.sums = at<WalkSumBlock>(base, sums_);
  return a;
}

}  // namespace moeccl::exec
