// SPDX-License-Identifier: Apache-2.0
// Computes what dispatch and combine must return, locally on each rank, from the routing of all ranks.
//
// Rows carry small integers and weights are 1 or 1/2, chosen so that every sum over a token's experts is exact in the
// element type, in whatever order it is added and however often it is rounded on the way. Therefore every value is
// compared bit by bit.
#ifndef PERF_MOE_ORACLE_H_
#define PERF_MOE_ORACLE_H_

#include <moeccl/moe.h>

#include <cstdint>
#include <vector>

#include "perf/moe/moe_options.h"

namespace perf {

// Returns whether the type has enough bits for a sum of top_k values. Otherwise all values would be zero, and the check
// would accept any sum.
bool is_exact(const DataType& type, int top_k);
// Returns whether the type has enough bits for weights of 1/2 and of 1.
bool has_half_weights(const DataType& type, int top_k);

class Oracle {
 public:
  // All references must outlive it. expert_rank[n_experts].
  Oracle(const MoeOptions& options, const std::vector<RankRouting>& routing, const std::vector<int32_t>& expert_rank,
         int rank);

  size_t n_rows() const { return rows_.size(); }
  size_t row_bytes() const { return row_bytes_; }

  // Each check returns how many entries, rows or tokens are wrong.
  uint64_t check_info(const moecclRoutingInfo_t& info) const;

  // Dispatch: row t carries its rank and token number. in[T, row], out[R, row].
  void fill_tokens(char* in) const;
  uint64_t check_rows(const char* out) const;

  // Combine, and the backward of dispatch: in[R, row] are experts' outputs (Rows layout: weighted and summed); out[T,
  // row]. weighted: sum as combine does; otherwise as the backward of dispatch does.
  void fill_outputs(char* in) const;
  uint64_t check_tokens(const char* out, bool weighted) const;

  // The backward of combine: in[T, row] are gradients; out[R, row]; weights[T][k] of the expert layout.
  void fill_gradients(char* in) const;
  uint64_t check_gradient_rows(const char* out) const;
  uint64_t check_gradient_weights(const float* weights) const;

 private:
  struct Choice {
    int32_t local_expert, expert;
    float weight;
  };
  struct Row {
    int32_t source = -1, token = -1;  // -1: padding
    std::vector<Choice> choices;
  };
  using Halves = std::vector<int32_t>;  // one row, in units of 1/2

  void find_dropped(const std::vector<RankRouting>& routing);
  void build_rows();
  void add_row(int32_t source, size_t token, std::vector<Choice> choices);
  const int8_t* output_values(int32_t source, size_t token, int32_t expert) const;
  const int8_t* gradient_values(int32_t source, size_t token) const;
  void write(const Halves& values, char* row) const;
  bool differs(const Halves& values, const char* row, std::vector<char>& scratch) const;
  uint64_t check_choices(const moecclRoutingInfo_t& info) const;
  void stamp(int32_t source, size_t token, char* row) const;

  const MoeOptions& options_;
  const std::vector<RankRouting>& routing_;
  const std::vector<int32_t>& expert_rank_;
  int rank_;
  const DataType& type_;
  size_t row_bytes_, k_;
  std::vector<std::vector<bool>> dropped_;  // [rank][token * k + j]
  std::vector<int32_t> drop_counts_;        // [n_experts], of this rank
  std::vector<int32_t> local_experts_;
  std::vector<int64_t> expert_offsets_;  // expert layout
  std::vector<int32_t> expert_counts_;
  std::vector<Row> rows_;
  std::vector<int8_t> values_;  // a row is a window of it
  std::vector<char> encoded_;   // half-units -> bytes of the type
  int32_t encoded_zero_ = 0;
};

}  // namespace perf

#endif  // PERF_MOE_ORACLE_H_
