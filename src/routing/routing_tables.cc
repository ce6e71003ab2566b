// SPDX-License-Identifier: Apache-2.0
#include "src/routing/routing_tables.h"

#include <algorithm>
#include <bit>

namespace moeccl::algo {

RowLists::RowLists(const RankEdges& edges) : n_in(static_cast<uint32_t>(edges.in.size())) {
  gather_first.push_back(0);
  for (const Edge& out : edges.out) gather_first.push_back(gather_first.back() + 1 + edges.n_in_before(out.hop));
  first_out.push_back(0);
  for (const Edge& in : edges.in) first_out.push_back(edges.first_out_after(in.hop));
}

RankPaths::RankPaths(const Paths& paths, const plan::LevelTree& full, const Placement& experts, uint32_t self)
    : RankRows(self, experts.n_local(self) > 0, paths.edges(self)),
      tree(full),
      placement(experts),
      algorithm(paths.algorithm()),
      canonical(CanonicalOrder(full, experts).position),
      source_of(paths.n_ranks(), 0),
      widths(paths.widths()) {
  std::vector<int32_t> edge_to(paths.n_ranks(), kNowhere);
  for (uint32_t j = 0; j < edges.out.size(); ++j) edge_to[edges.out[j].peer] = static_cast<int32_t>(j);
  for (const uint32_t owner : experts.owner) way.push_back(owner == rank ? kHere : edge_to[paths.next(rank, owner)]);
  for (uint32_t i = 0; i < edges.in.size(); ++i)
    for (const uint32_t origin : edges.in[i].origins) source_of[origin] = 1 + i;
}

void RowList::clear() { src.clear(), dst.clear(), weight.clear(), first.clear(), dst_first.clear(); }
uint64_t RowList::bytes() const {
  return (src.capacity() + dst.capacity()) * sizeof(uint32_t) + weight.capacity() * sizeof(float) +
         (first.capacity() + dst_first.capacity()) * sizeof(uint64_t);
}
void SumList::clear() {
  offset.assign(1, 0);
  term.clear(), weight.clear(), first.clear();
}
uint64_t SumList::bytes() const {
  return (offset.capacity() + first.capacity()) * sizeof(uint64_t) + term.capacity() * sizeof(plan::RowTermRef) +
         weight.capacity() * sizeof(float);
}

Status RoutingTables::receive(const RankPaths& paths, const MoeShape& shape, std::span<const RecordView> records,
                              std::span<const uint64_t> n_tokens, bool weighted) {
  paths_ = &paths;
  shape_ = shape;
  weighted_ = weighted;
  records_.assign(records.begin(), records.end());
  n_tokens_.assign(n_tokens.begin(), n_tokens.end());
  rows_out_.assign(paths.edges.out.size(), 0);
  rows_in_.assign(paths.edges.in.size(), 0);
  const std::span<const uint32_t> local = paths.placement.experts_of(paths.rank);
  local_experts.assign(local.begin(), local.end());
  expert_counts.assign(local.size(), 0);
  for (uint32_t o = 0; o < records_.size(); ++o) MOECCL_TRY(check_records(o));
  place_rows();
  return {};
}

// Makes one pass over an origin's records. It trusts nothing in them, and counts what later passes need.
Status RoutingTables::check_records(uint32_t origin) {
  const RankPaths& p = *paths_;
  const RecordView& v = records_[origin];
  const bool own = origin == p.rank;
  const uint32_t source = p.source_of[origin];
  const auto bad = [&](const char* what) {
    return error(moecclInternalError, "routing records of rank {} are wrong: {}", origin, what);
  };
  if (!own && source == 0 && v.n_records > 0) return bad("its rows do not come here");
  const int32_t first_out = static_cast<int32_t>(p.lists.first_out[source]);
  const uint32_t n_experts = p.placement.n_experts();
  uint64_t choice = 0, n_local = 0;
  int64_t last_token = -1;
  for (uint32_t i = 0; i < v.n_records; ++i) {
    if (v.token[i] >= n_tokens_[origin] || v.token[i] <= last_token) return bad("tokens out of order");
    last_token = v.token[i];
    if (v.n_experts[i] > v.n_choices - choice || v.n_experts[i] > shape_.top_k) return bad("too many choices");
    if (!own && v.n_experts[i] == 0) return bad("a token without choices");
    int32_t last_way = RankPaths::kNowhere;
    int64_t last_position = -1;
    for (uint32_t k = 0; k < v.n_experts[i]; ++k, ++choice) {
      const uint32_t e = v.expert[choice];
      if (e >= n_experts || p.canonical[e] <= last_position) return bad("experts out of order");
      last_position = p.canonical[e];
      const int32_t way = p.way[e];
      if (way == RankPaths::kHere) {
        ++expert_counts[p.placement.local_index[e]];
        ++n_local;
      } else if (way < first_out) {
        return bad("an expert that is not reached through here");
      } else if (!p.algorithm.dedup() || way != last_way) {
        ++rows_out_[static_cast<size_t>(way)];
      }
      last_way = way;
    }
    if (!own) rows_in_[source - 1] += p.algorithm.dedup() ? 1 : v.n_experts[i];
  }
  if (choice != v.n_choices) return bad("choices left over");
  if (weighted_ && v.n_weights != (own ? v.n_choices : n_local)) return bad("weights do not match choices");
  return {};
}

// Orders the rows of Output by (origin, token), whatever way they came.
void RoutingTables::place_rows() {
  const RankPaths& p = *paths_;
  residual_row_.clear();
  weights_at_expert_ = false;
  row_source.clear(), row_token.clear(), choice_expert.clear(), choice_weight.clear(), choice_row.clear();
  expert_offsets.clear(), choice_offsets.clear(), choice_first.clear();
  n_rows_ = n_unique_ = 0;
  if (shape_.expert_major) place_groups();
  for (uint32_t o = 0; o < records_.size(); ++o) {
    const RecordView& v = records_[o];
    choice_first.push_back(static_cast<uint32_t>(choice_row.size()));
    uint32_t choice = 0, weight = 0;
    for (uint32_t i = 0; i < v.n_records; ++i) {
      bool first = true;
      for (uint32_t k = 0; k < v.n_experts[i]; ++k, ++choice) {
        const uint32_t e = v.expert[choice];
        if (p.way[e] != RankPaths::kHere) continue;
        const float w = weighted_ ? v.weight[o == p.rank ? choice : weight++] : 1.0f;
        place_choice(o, v.token[i], e, w, first);
        first = false;
      }
    }
  }
  choice_first.push_back(static_cast<uint32_t>(choice_row.size()));
  if (shape_.expert_major) {
    place_padding();
  } else {
    n_rows_ = n_unique_;
    choice_offsets.push_back(static_cast<int64_t>(choice_expert.size()));
  }
}

void RoutingTables::place_choice(uint32_t origin, uint32_t token, uint32_t expert, float weight, bool first) {
  const uint32_t index = paths_->placement.local_index[expert];
  n_unique_ += first;
  if (shape_.expert_major) {
    const size_t row = static_cast<size_t>(placed_[index]++);
    row_source[row] = static_cast<int32_t>(origin);
    row_token[row] = static_cast<int32_t>(token);
    choice_weight[row] = weight;
    choice_row.push_back(static_cast<uint32_t>(row));
    return;
  }
  if (first) {
    row_source.push_back(static_cast<int32_t>(origin));
    row_token.push_back(static_cast<int32_t>(token));
    choice_offsets.push_back(static_cast<int64_t>(choice_expert.size()));
  }
  choice_expert.push_back(static_cast<int32_t>(index));
  choice_weight.push_back(weight);
  choice_row.push_back(static_cast<uint32_t>(n_unique_ - 1));
}

// Groups of ExpertMajor begin at multiples of the alignment. All rows are padding until a choice takes them.
void RoutingTables::place_groups() {
  const int64_t align = shape_.align_rows;
  expert_offsets.push_back(0);
  for (const int32_t count : expert_counts)
    expert_offsets.push_back(expert_offsets.back() + (count + align - 1) / align * align);
  placed_.assign(expert_offsets.begin(), expert_offsets.end() - 1);
  n_rows_ = static_cast<uint64_t>(expert_offsets.back());
  row_source.assign(n_rows_, -1);
  row_token.assign(n_rows_, -1);
  choice_weight.assign(n_rows_, 0.0f);
}

void RoutingTables::place_padding() {
  padding_.clear();
  for (size_t e = 0; e < placed_.size(); ++e)
    for (int64_t row = placed_[e]; row < expert_offsets[e + 1]; ++row) padding_.push_back(static_cast<uint32_t>(row));
  padding_offsets_.assign(padding_.size() + 1, 0);
}

void RoutingTables::take_rows(std::vector<uint32_t> choice_rows, std::vector<uint32_t> residual_rows, uint64_t n_rows,
                              const RoutingTables& before) {
  choice_row = std::move(choice_rows);
  residual_row_ = std::move(residual_rows);
  weights_at_expert_ = true;
  n_rows_ = n_rows;
  padding_ = before.padding_;
  padding_offsets_ = before.padding_offsets_;
}

uint64_t RoutingTables::largest_edge_rows() const {
  uint64_t most = 0;
  for (const uint64_t rows : rows_out_) most = std::max(most, rows);
  for (const uint64_t rows : rows_in_) most = std::max(most, rows);
  return most;
}

namespace {

// Returns the first token of chunk `chunk`: the least t with t * C / T >= chunk.
uint64_t first_token(uint64_t chunk, uint64_t n_chunks, uint64_t n_tokens) {
  return (chunk * n_tokens + n_chunks - 1) / n_chunks;
}

}  // namespace

// Calls fn(token, edge, rows) for each row that arrives (edge < n_in) or leaves (n_in + out edge). The caller finds the
// chunk of a token.
template <class Fn>
void RoutingTables::for_each_row(uint32_t origin, Fn&& fn) const {
  const RankPaths& p = *paths_;
  const RecordView& v = records_[origin];
  const uint32_t source = p.source_of[origin], n_in = p.lists.n_in;
  const bool dedup = p.algorithm.dedup();
  uint32_t choice = 0;
  for (uint32_t i = 0; i < v.n_records; ++i) {
    if (origin != p.rank) fn(v.token[i], source - 1, dedup ? 1u : v.n_experts[i]);
    int32_t last = RankPaths::kNowhere;
    for (uint32_t k = 0; k < v.n_experts[i]; ++k, ++choice) {
      const int32_t way = p.way[v.expert[choice]];
      if (way >= 0 && (!dedup || way != last)) fn(v.token[i], n_in + static_cast<uint32_t>(way), 1u);
      last = way;
    }
  }
}

// Returns the rows that a slot needs for a block of edge `e` (in edges first) with `rows` rows.
uint64_t RoutingTables::in_slot(size_t e, uint64_t rows, uint64_t slot_rows) const {
  const RankEdges& edges = paths_->edges;
  const Edge& edge = e < edges.in.size() ? edges.in[e] : edges.out[e - edges.in.size()];
  return paths_->widths.in_slot(edge.hop, rows, slot_rows);
}

// Returns the same for the fullest block of any chunk.
uint64_t RoutingTables::fullest_slot(uint32_t n_chunks, uint64_t slot_rows) const {
  const size_t n_edges = rows_in_.size() + rows_out_.size();
  std::vector<uint32_t> rows(n_edges * n_chunks, 0);
  for (uint32_t o = 0; o < records_.size(); ++o) {
    uint64_t chunk = 0, end = first_token(1, n_chunks, n_tokens_[o]);
    for_each_row(o, [&](uint32_t token, uint32_t edge, uint32_t n) {
      while (token >= end) end = first_token(++chunk + 1, n_chunks, n_tokens_[o]);
      rows[chunk * n_edges + edge] += n;
    });
  }
  uint64_t most = 0;
  for (size_t e = 0; e < n_edges; ++e) {
    uint32_t fullest = 0;
    for (size_t at = e; at < rows.size(); at += n_edges) fullest = std::max(fullest, rows[at]);
    most = std::max(most, in_slot(e, fullest, slot_rows));
  }
  return most;
}

uint32_t RoutingTables::min_chunks(uint64_t slot_rows, uint64_t* needed_rows) const {
  const uint64_t most_tokens = *std::max_element(n_tokens_.begin(), n_tokens_.end());
  // A chunk with one token of each origin is the finest cut there is.
  const uint64_t limit = std::bit_ceil(std::max<uint64_t>(most_tokens, 1));
  uint64_t total = 0;
  for (size_t e = 0; e < rows_in_.size() + rows_out_.size(); ++e)
    total = std::max(total, in_slot(e, e < rows_in_.size() ? rows_in_[e] : rows_out_[e - rows_in_.size()], slot_rows));
  *needed_rows = 0;
  if (total <= slot_rows) return 1;
  uint64_t n_chunks = slot_rows == 0 ? limit : std::min(limit, std::bit_ceil((total + slot_rows - 1) / slot_rows));
  for (;; n_chunks *= 2) {
    const uint64_t fullest = fullest_slot(static_cast<uint32_t>(n_chunks), slot_rows);
    if (fullest <= slot_rows) return static_cast<uint32_t>(n_chunks);
    if (n_chunks >= limit) {
      *needed_rows = fullest;
      return 0;
    }
  }
}

RoutingLoad RoutingTables::load() const {
  RoutingLoad load{n_tokens_[paths_->rank], 0, 0, n_rows_, paths_->lists.n_rows() + uint64_t{1} + paths_->lists.n_in};
  for (const RecordView& v : records_) {
    load.records += v.n_records;
    load.choices += v.n_choices;
  }
  return load;
}

uint64_t RoutingTables::bytes_bound(const RoutingLoad& load, uint32_t n_chunks) {
  // A choice costs at most a gathered row, a scattered row with weight, a term with weight, its own sum, and its
  // entries in the arrays of the info; a record costs one sum.
  const uint64_t per_choice = 4 + 12 + sizeof(plan::RowTermRef) + 4 + 8 + 3 * 4;
  const uint64_t per_row = 2 * 4 + 8 + 4 + 4 + 8;
  const uint64_t per_block = 2 * (sizeof(plan::RowBlock) + sizeof(plan::SumBlock)) + 2 * 8;
  const uint64_t blocks = load.lists * (uint64_t{n_chunks} + 1);
  return 2 * (load.choices * per_choice + (load.records + load.tokens) * 8 + load.rows * per_row + blocks * per_block) +
         (uint64_t{1} << 16);
}

uint64_t RoutingTables::bytes() const {
  uint64_t total = 0;
  for (const RowList& list : row_lists_) total += list.bytes();
  for (const SumList& list : sum_lists_) total += list.bytes();
  const auto held = [&](const auto& v) { total += v.capacity() * sizeof(v[0]); };
  held(rows_), held(weighted_rows_), held(sums_), held(weighted_sums_), held(zero_sums_);
  held(row_source), held(row_token), held(choice_expert), held(choice_weight), held(choice_row), held(choice_offsets);
  held(padding_), held(padding_offsets_);
  return total;
}

}  // namespace moeccl::algo
