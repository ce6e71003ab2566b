// SPDX-License-Identifier: Apache-2.0
// The tables that a routing gives one rank: the row lists of every hop and chunk for dispatch, their mirror for
// combine, and the arrays of moecclRoutingInfo_t. RowLists numbers the lists, for the plans (moe_plan.h) too.
//
// A token t of T on its origin belongs to chunk t * C / T of C, in all hops. The rows of a block are ordered by its
// edge's origins, then by tokens, then by choices. Sender and receiver walk their records in that order, and so agree
// without exchanging messages.
#pragma once

#include <span>
#include <vector>

#include "src/plan/binding.h"
#include "src/routing/routing.h"

namespace moeccl::algo {

// Numbers the row and sum lists of a rank. Source 0 is the rank's own Input; source 1 + i is what arrived by in edge i.
struct RowLists {
  explicit RowLists(const RankEdges& edges);
  // Dispatch, rows: the list from a source to out edge `out`. Only sources of a smaller hop have one.
  uint32_t gather(uint32_t out, uint32_t source) const { return gather_first[out] + source; }
  uint32_t n_sources(uint32_t out) const { return gather_first[out + 1] - gather_first[out]; }
  // Dispatch, rows: the list from a source to Output.
  uint32_t scatter(uint32_t source) const { return gather_first.back() + source; }
  uint32_t n_rows() const { return gather_first.back() + 1 + n_in; }
  // Dispatch, sums: list 0 zeroes the padding.
  // Combine, sums: list 0 fills Output, and list 1 + i returns rows by in edge i. Their segments are Input, then the
  // out edges of greater hops, the first of which is first_out[source].
  uint32_t n_in = 0;
  std::vector<uint32_t> gather_first;  // [n_out + 1]
  std::vector<uint32_t> first_out;     // [1 + n_in]
};

// Everything that the programs of one rank depend on.
struct RankRows {
  RankRows(uint32_t self, bool owns_experts, RankEdges found)
      : rank(self), owns(owns_experts), edges(std::move(found)), lists(edges) {}

  uint32_t rank;
  bool owns;  // true if the rank owns experts
  RankEdges edges;
  RowLists lists;
};

// The constant part of a routing on one rank, for one algorithm.
struct RankPaths : RankRows {
  RankPaths(const Paths& paths, const plan::LevelTree& tree, const Placement& placement, uint32_t rank);

  const plan::LevelTree& tree;  // the full tree
  const Placement& placement;
  MoeAlgorithm algorithm;
  std::vector<int32_t> way;         // [n_experts] out edge towards the owner; kHere: this rank; kNowhere: no edge
  std::vector<uint32_t> canonical;  // [n_experts] position in CanonicalOrder
  std::vector<uint32_t> source_of;  // [n_ranks] the source that an origin's rows come from
  BlockWidths widths;
  static constexpr int32_t kHere = -1, kNowhere = -2;
};

// One list for all chunks, flattened; its memory is reused between steps.
struct RowList {
  std::vector<uint32_t> src, dst;
  std::vector<float> weight;
  std::vector<uint64_t> first, dst_first;  // [chunks + 1], [chunks]: first row, and where it goes in the slot
  void clear();
  uint64_t bytes() const;
};
struct SumList {
  std::vector<uint64_t> offset;  // [rows + 1]
  std::vector<plan::RowTermRef> term;
  std::vector<float> weight;    // [terms] or empty
  std::vector<uint64_t> first;  // [chunks + 1]
  void clear();
  uint64_t bytes() const;
};

// The amounts that one rank handles, for bounds on memory.
struct RoutingLoad {
  uint64_t tokens = 0;   // own tokens
  uint64_t records = 0;  // own and received records
  uint64_t choices = 0;  // choices in the records
  uint64_t rows = 0;     // R
  uint64_t lists = 0;
};

class RoutingTables {
 public:
  // records[n_ranks] are those of each origin, this rank's own included; they must stay valid until build() is done.
  // Checks everything in a record before using any of it as an index.
  Status receive(const RankPaths& paths, const MoeShape& shape, std::span<const RecordView> records,
                 std::span<const uint64_t> n_tokens, bool weighted);
  // Returns the least power of two of chunks with which each block that this rank sends or receives fits its slots of
  // slot_rows rows (MoePlanShape). Returns 0 if there is none, and sets *needed_rows to the rows that a slot would
  // need. If C chunks suffice, so do 2C, because the chunks of 2C nest in those of C: ranks agree by taking their
  // maximum.
  uint32_t min_chunks(uint64_t slot_rows, uint64_t* needed_rows) const;
  void build(uint32_t n_chunks);
  // Called between receive() and build() for a routing whose tokens begin elsewhere than those of `before` (replace.h).
  // Output has n_rows rows, which are where `choice_rows` says, by local choice; the padding is that of `before`. After
  // a choice, the row residual_rows[choice] is summed too, with weight 1, unless it is kNoRow. Weights are applied
  // where the experts' rows are, for every algorithm.
  void take_rows(std::vector<uint32_t> choice_rows, std::vector<uint32_t> residual_rows, uint64_t n_rows,
                 const RoutingTables& before);
  static constexpr uint32_t kNoRow = ~0u;

  // For Binding. `weighted` is set for combine and for the dispatch of combine's gradient.
  std::span<const plan::RowBlock> dispatch_rows(bool weighted) const { return weighted ? weighted_rows_ : rows_; }
  std::span<const plan::SumBlock> dispatch_sums() const { return zero_sums_; }
  std::span<const plan::SumBlock> combine_sums(bool weighted) const { return weighted ? weighted_sums_ : sums_; }

  uint32_t n_chunks() const { return n_chunks_; }
  uint64_t n_rows() const { return n_rows_; }  // R
  uint64_t n_unique() const { return n_unique_; }
  bool weighted() const { return weighted_; }
  bool expert_major() const { return shape_.expert_major; }
  // Returns the rows that combine returns by an in edge. Call this after build().
  uint64_t rows_returned(uint32_t in_edge) const {
    return sum_lists_[1 + in_edge].first.back() - sum_lists_[1 + in_edge].first.front();
  }
  std::span<const uint64_t> rows_out() const { return rows_out_; }  // [out edges] rows that dispatch sends
  uint64_t largest_edge_rows() const;                               // over out and in edges, all chunks together
  RoutingLoad load() const;
  uint64_t bytes() const;  // bytes that the tables hold
  // Returns the most bytes() for a load, with the doubling of vectors included.
  static uint64_t bytes_bound(const RoutingLoad& load, uint32_t n_chunks);

  // moecclRoutingInfo_t
  std::vector<int32_t> local_experts, expert_counts, row_source, row_token, choice_expert;
  std::vector<int64_t> expert_offsets, choice_offsets;
  std::vector<float> choice_weight;
  // The row of Output of each local choice, by (origin, token, expert); those of origin o begin at choice_first[o].
  std::vector<uint32_t> choice_row, choice_first;

 private:
  struct Cursor {
    uint32_t record = 0, choice = 0, weight = 0, local = 0;
  };
  class Walk;
  Status check_records(uint32_t origin);
  void place_rows();
  void place_choice(uint32_t origin, uint32_t token, uint32_t expert, float weight, bool first);
  void place_groups();
  void place_padding();
  uint64_t in_slot(size_t e, uint64_t rows, uint64_t slot_rows) const;
  uint64_t fullest_slot(uint32_t n_chunks, uint64_t slot_rows) const;
  template <class Fn>
  void for_each_row(uint32_t origin, Fn&& fn) const;
  void bind();
  void bind_sums();

  const RankPaths* paths_ = nullptr;
  MoeShape shape_;
  bool weighted_ = false;
  std::vector<RecordView> records_;
  std::vector<uint64_t> n_tokens_;
  std::vector<uint64_t> rows_out_, rows_in_;
  uint32_t n_chunks_ = 1;
  uint64_t n_rows_ = 0, n_unique_ = 0;
  std::vector<uint32_t> residual_row_;  // [local choices], or empty
  bool weights_at_expert_ = false;
  std::vector<int64_t> placed_;  // expert_major: rows of each group so far
  std::vector<uint32_t> padding_;
  std::vector<uint64_t> padding_offsets_;
  std::vector<RowList> row_lists_;
  std::vector<SumList> sum_lists_;
  std::vector<plan::RowBlock> rows_, weighted_rows_;
  std::vector<plan::SumBlock> sums_, weighted_sums_, zero_sums_;
};

}  // namespace moeccl::algo
