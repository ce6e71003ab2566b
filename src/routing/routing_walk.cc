// SPDX-License-Identifier: Apache-2.0
// The pass that fills the lists of RoutingTables: chunk by chunk, source by source, origin by origin, token by token.
#include <algorithm>

#include "src/routing/routing_tables.h"

namespace moeccl::algo {

class RoutingTables::Walk {
 public:
  Walk(RoutingTables& tables, uint32_t n_chunks)
      : t_(tables), p_(*tables.paths_), n_chunks_(n_chunks), cursors_(tables.records_.size()) {
    for (uint32_t o = 0; o < cursors_.size(); ++o) cursors_[o].local = tables.choice_first[o];
    // Weights are applied where experts' rows are first summed: at the expert with partial sums, else at the origin.
    term_weights_ = tables.weighted_ && tables.shape_.expert_major;
  }

  void run() {
    for (chunk_ = 0; chunk_ < n_chunks_; ++chunk_) {
      rows_out_.assign(p_.edges.out.size(), 0);
      returns_.assign(p_.edges.out.size(), 0);
      walk_source(0, {&p_.rank, 1});
      for (uint32_t i = 0; i < p_.edges.in.size(); ++i) walk_source(1 + i, p_.edges.in[i].origins);
    }
    for (RowList& list : t_.row_lists_) list.first.push_back(list.src.size());
    for (SumList& list : t_.sum_lists_) list.first.push_back(list.offset.size() - 1);
  }

 private:
  void walk_source(uint32_t source, std::span<const uint32_t> origins) {
    source_ = source;
    first_out_ = p_.lists.first_out[source];
    rows_in_ = 0;
    for (uint32_t j = first_out_; j < p_.edges.out.size(); ++j) {
      RowList& list = gather(j);
      list.first.push_back(list.src.size());
      list.dst_first.push_back(rows_out_[j]);
    }
    scatter_ = &t_.row_lists_[p_.lists.scatter(source)];
    scatter_->first.push_back(scatter_->src.size());
    sum_ = &t_.sum_lists_[source];
    sum_->first.push_back(sum_->offset.size() - 1);
    for (const uint32_t origin : origins) walk_origin(origin);
  }

  void walk_origin(uint32_t origin) {
    view_ = &t_.records_[origin];
    own_ = origin == p_.rank;
    ordered_ = own_ && t_.shape_.by_choice;
    Cursor& at = cursors_[origin];
    // Chunk c ends before the least t with t * C / T >= c + 1.
    const uint64_t end = ((uint64_t{chunk_} + 1) * t_.n_tokens_[origin] + n_chunks_ - 1) / n_chunks_;
    const bool dedup = p_.algorithm.dedup();
    for (; at.record < view_->n_records && view_->token[at.record] < end; ++at.record) {
      if (dedup)
        walk_merged(at);
      else
        walk_single(at);
    }
  }

  // There is one row per holder: it goes on once by each out edge, and one partial sum returns (Eq. 7 and its mirror).
  void walk_merged(Cursor& at) {
    const uint32_t row_in = own_ ? view_->token[at.record] : rows_in_++;
    int32_t last = RankPaths::kNowhere;
    begin_sum();
    for (uint32_t k = 0; k < view_->n_experts[at.record]; ++k, ++at.choice) {
      const uint32_t e = view_->expert[at.choice];
      const int32_t way = p_.way[e];
      if (way == RankPaths::kHere) {
        const float weight = weight_of(at, true);
        const uint32_t residual = residual_of(at), row = t_.choice_row[at.local++];
        if (t_.shape_.expert_major || way != last) {
          scatter(row_in, row, weight);
          term(0, row, weight, e);
        }
        add_residual(row_in, residual, e);
      } else if (way != last) {
        const uint32_t j = static_cast<uint32_t>(way);
        gather(j).src.push_back(row_in);
        term(1 + j - first_out_, rows_out_[j]++, 1.0f, e);
      }
      last = way;
      last_owner_ = p_.placement.owner[e];
    }
    end_sum();
  }

  // There is one row per choice. In the Rows layout, a rank keeps the first copy, and only that one returns.
  void walk_single(Cursor& at) {
    const bool keep_all = t_.shape_.expert_major;
    if (own_) begin_sum();
    uint32_t owner_before = ~0u;
    for (uint32_t k = 0; k < view_->n_experts[at.record]; ++k, ++at.choice) {
      const uint32_t e = view_->expert[at.choice], owner = p_.placement.owner[e];
      const uint32_t row_in = own_ ? view_->token[at.record] : rows_in_++;
      const bool kept = keep_all || owner != owner_before;
      owner_before = owner;
      const bool here = p_.way[e] == RankPaths::kHere;
      const float weight = weight_of(at, here);
      uint32_t segment = 0, row = 0, residual = kNoRow;
      if (here) {
        residual = residual_of(at);
        row = t_.choice_row[at.local++];
        if (kept) scatter(row_in, row, weight);
      } else {
        const uint32_t j = static_cast<uint32_t>(p_.way[e]);
        gather(j).src.push_back(row_in);
        ++rows_out_[j];
        segment = 1 + j - first_out_;
        if (kept) row = returns_[j]++;
      }
      if (ordered_ && !kept) keys_.back() = std::max(keys_.back(), view_->choice[at.choice]);
      if (!kept) continue;
      if (!own_) begin_sum();
      if (ordered_) keys_.push_back(view_->choice[at.choice]);
      term(segment, row, own_ || t_.weights_at_expert_ ? weight : 1.0f, e);
      last_owner_ = owner;
      add_residual(row_in, residual, e);
      if (!own_) end_sum();
    }
    if (own_) end_sum();
  }

  // A view of own choices has all weights; a received one has those of local experts.
  float weight_of(Cursor& at, bool here) {
    if (!t_.weighted_) return 1.0f;
    if (own_) return view_->weight[at.choice];
    return here ? view_->weight[at.weight++] : 1.0f;
  }

  uint32_t residual_of(const Cursor& at) const {
    return t_.residual_row_.empty() ? kNoRow : t_.residual_row_[at.local];
  }
  // Adds the token's own input next to its expert's row (NetMoE, Appendix A).
  void add_residual(uint32_t row_in, uint32_t residual, uint32_t expert) {
    if (residual == kNoRow) return;
    last_owner_ = p_.rank;
    scatter(row_in, residual, 1.0f);
    term(0, residual, 1.0f, expert);
  }

  RowList& gather(uint32_t out) { return t_.row_lists_[p_.lists.gather(out, source_)]; }
  void scatter(uint32_t src, uint32_t dst, float weight) {
    scatter_->src.push_back(src);
    scatter_->dst.push_back(dst);
    if (term_weights_) scatter_->weight.push_back(weight);
  }

  void begin_sum() {
    sum_empty_ = true;
    keys_.clear();
  }
  void term(uint32_t segment, uint32_t row, float weight, uint32_t expert) {
    if (!sum_empty_ && t_.shape_.grouped) {
      // Ends all groups that hold the previous term but not this one: the levels inwards from where their owners
      // differ.
      const uint32_t level = p_.tree.level_between(last_owner_, p_.placement.owner[expert]);
      sum_->term.back().close = static_cast<uint16_t>(p_.tree.depth() - level);
    }
    sum_empty_ = false;
    sum_->term.push_back({row, static_cast<uint16_t>(segment), 0});
    if (term_weights_) sum_->weight.push_back(weight);
  }
  void end_sum() {
    if (ordered_) order_terms();
    sum_->offset.push_back(sum_->term.size());
  }
  // Puts the terms of this sum in the order of their keys. There are at most 64, so insertion is quick.
  void order_terms() {
    const size_t first = sum_->offset.back();
    for (size_t end = 1; end < keys_.size(); ++end) {
      for (size_t i = end; i > 0 && keys_[i - 1] > keys_[i]; --i) {
        std::swap(keys_[i - 1], keys_[i]);
        std::swap(sum_->term[first + i - 1], sum_->term[first + i]);
        if (term_weights_) std::swap(sum_->weight[first + i - 1], sum_->weight[first + i]);
      }
    }
  }

  RoutingTables& t_;
  const RankPaths& p_;
  uint32_t n_chunks_, chunk_ = 0;
  std::vector<Cursor> cursors_;               // [n_ranks] by origin
  std::vector<uint32_t> rows_out_, returns_;  // [out edges] rows of this chunk so far: dispatched, returned by combine
  bool term_weights_ = false;
  uint32_t source_ = 0, first_out_ = 0, rows_in_ = 0;
  bool own_ = false, ordered_ = false, sum_empty_ = true;
  std::vector<uint32_t> keys_;  // ordered_: of each term of this sum, the last choice whose row it adds
  uint32_t last_owner_ = 0;
  const RecordView* view_ = nullptr;
  RowList* scatter_ = nullptr;
  SumList* sum_ = nullptr;
};

void RoutingTables::build(uint32_t n_chunks) {
  n_chunks_ = n_chunks;
  row_lists_.resize(paths_->lists.n_rows());
  sum_lists_.resize(1 + paths_->lists.n_in);
  for (RowList& list : row_lists_) list.clear();
  for (SumList& list : sum_lists_) list.clear();
  Walk(*this, n_chunks).run();
  bind();
  bind_sums();
}

void RoutingTables::bind() {
  const size_t n_blocks = row_lists_.size() * n_chunks_;
  rows_.assign(n_blocks, {});
  weighted_rows_.assign(n_blocks, {});
  for (size_t l = 0; l < row_lists_.size(); ++l) {
    const RowList& list = row_lists_[l];
    for (uint32_t c = 0; c < n_chunks_; ++c) {
      plan::RowBlock& block = rows_[l * n_chunks_ + c];
      const uint64_t first = list.first[c];
      block.count = list.first[c + 1] - first;
      block.src_index = list.src.data() + first;
      if (l < paths_->lists.gather_first.back())
        block.dst_first = list.dst_first[c];
      else
        block.dst_index = list.dst.data() + first;
      plan::RowBlock& weighted = weighted_rows_[l * n_chunks_ + c] = block;
      if (!list.weight.empty()) weighted.weights = list.weight.data() + first;
    }
  }
}

void RoutingTables::bind_sums() {
  const size_t n_blocks = sum_lists_.size() * n_chunks_;
  sums_.assign(n_blocks, {});
  weighted_sums_.assign(n_blocks, {});
  for (size_t l = 0; l < sum_lists_.size(); ++l) {
    const SumList& list = sum_lists_[l];
    for (uint32_t c = 0; c < n_chunks_; ++c) {
      plan::SumBlock& block = sums_[l * n_chunks_ + c];
      const uint64_t first = list.first[c];
      block.offsets = list.offset.data() + first;
      block.terms = list.term.data();
      block.count = list.first[c + 1] - first;
      if (l == 0) block.dst_first = first;  // Output: rows are tokens
      plan::SumBlock& weighted = weighted_sums_[l * n_chunks_ + c] = block;
      if (!list.weight.empty()) weighted.weights = list.weight.data();
    }
  }
  zero_sums_.assign(n_chunks_, {});
  if (!shape_.expert_major) return;
  zero_sums_[0].offsets = padding_offsets_.data();
  zero_sums_[0].dst_index = padding_.data();
  zero_sums_[0].count = padding_.size();
}

}  // namespace moeccl::algo
