// SPDX-License-Identifier: Apache-2.0
#include "perf/moe/oracle.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "perf/common/pattern.h"

namespace perf {
namespace {

// Windows into the table of values: a prime, and many times the tokens of a usual step.
constexpr size_t kWindows = 65521;
// Larger values test nothing more, and with these, dot products of a row stay exact in fp32.
constexpr int64_t kLargest = 16;
constexpr uint64_t kOutputs = 11, kGradients = 12;

// Returns the largest value of a row such that k of them, times the weights, stay exact.
int64_t largest_value(const DataType& type, int top_k) {
  const int64_t halves = type.exact / (2 * top_k);
  return std::min(kLargest, halves >= 1 ? halves : type.exact / top_k);
}

}  // namespace

bool is_exact(const DataType& type, int top_k) { return type.exact >= top_k; }

bool has_half_weights(const DataType& type, int top_k) { return type.exact / (2 * top_k) >= 1; }

Oracle::Oracle(const MoeOptions& options, const std::vector<RankRouting>& routing,
               const std::vector<int32_t>& expert_rank, int rank)
    : options_(options),
      routing_(routing),
      expert_rank_(expert_rank),
      rank_(rank),
      type_(data_type(options.type)),
      row_bytes_(options.hidden * data_type(options.type).bytes),
      k_(static_cast<size_t>(options.top_k)),
      drop_counts_(static_cast<size_t>(options.n_experts)) {
  const int64_t largest = largest_value(type_, options.top_k);
  values_.resize(kWindows + options.hidden);
  for (size_t i = 0; i < values_.size(); i++)
    values_[i] = static_cast<int8_t>(
        static_cast<int64_t>(mix(options.seed, i) % static_cast<uint64_t>(2 * largest + 1)) - largest);
  encoded_zero_ = static_cast<int32_t>(2 * largest * options.top_k);
  encoded_.resize((2 * static_cast<size_t>(encoded_zero_) + 1) * type_.bytes);
  for (int32_t halves = -encoded_zero_; halves <= encoded_zero_; halves++) {
    // Sums beyond the exact integers do not occur; where weights are whole, odd halves do not either.
    const bool occurs =
        std::abs(halves) <= 2 * type_.exact && (has_half_weights(type_, options.top_k) || halves % 2 == 0);
    if (occurs) store(type_, halves / 2.0, &encoded_[static_cast<size_t>(halves + encoded_zero_) * type_.bytes]);
  }
  find_dropped(routing);
  build_rows();
}

// Applies the capacity: the first tokens of each rank, in order, stay.
void Oracle::find_dropped(const std::vector<RankRouting>& routing) {
  for (size_t source = 0; source < routing.size(); source++) {
    const RankRouting& r = routing[source];
    std::vector<int> taken(static_cast<size_t>(options_.n_experts));
    std::vector<bool> dropped(r.index.size());
    for (size_t i = 0; i < r.index.size(); i++) {
      if (r.index[i] < 0) continue;
      const size_t expert = static_cast<size_t>(r.index[i]);
      dropped[i] = options_.capacity > 0 && taken[expert]++ >= options_.capacity;
      if (dropped[i] && source == static_cast<size_t>(rank_)) drop_counts_[expert]++;
    }
    dropped_.push_back(std::move(dropped));
  }
}

void Oracle::add_row(int32_t source, size_t token, std::vector<Choice> choices) {
  Row row;
  row.source = source;
  row.token = static_cast<int32_t>(token);
  row.choices = std::move(choices);
  rows_.push_back(std::move(row));
}

void Oracle::build_rows() {
  for (int32_t e = 0; e < options_.n_experts; e++)
    if (expert_rank_[static_cast<size_t>(e)] == rank_) local_experts_.push_back(e);
  std::vector<std::vector<Row>> by_expert(local_experts_.size());
  for (size_t source = 0; source < routing_.size(); source++)
    for (size_t token = 0; token < routing_[source].n_tokens; token++) {
      std::vector<Choice> choices;
      for (size_t j = token * k_; j < (token + 1) * k_; j++) {
        const int32_t expert = routing_[source].index[j];
        if (expert < 0 || dropped_[source][j] || expert_rank_[static_cast<size_t>(expert)] != rank_) continue;
        const auto at = std::lower_bound(local_experts_.begin(), local_experts_.end(), expert) - local_experts_.begin();
        choices.push_back({static_cast<int32_t>(at), expert, routing_[source].weight[j]});
      }
      std::sort(choices.begin(), choices.end(), [](const Choice& a, const Choice& b) { return a.expert < b.expert; });
      for (const Choice& c : choices) {
        Row row;
        row.source = static_cast<int32_t>(source);
        row.token = static_cast<int32_t>(token);
        row.choices = {c};
        by_expert[static_cast<size_t>(c.local_expert)].push_back(std::move(row));
      }
      if (options_.layout == moecclLayoutRows && !choices.empty())
        add_row(static_cast<int32_t>(source), token, std::move(choices));
    }
  const size_t align = static_cast<size_t>(options_.align_rows);
  for (std::vector<Row>& group : by_expert) {
    expert_counts_.push_back(static_cast<int32_t>(group.size()));
    if (options_.layout == moecclLayoutRows) continue;
    expert_offsets_.push_back(static_cast<int64_t>(rows_.size()));
    for (Row& row : group) rows_.push_back(std::move(row));
    rows_.resize((rows_.size() + align - 1) / align * align);
  }
  expert_offsets_.push_back(static_cast<int64_t>(rows_.size()));
}

uint64_t Oracle::check_choices(const moecclRoutingInfo_t& info) const {
  uint64_t wrong = 0;
  size_t at = 0;
  for (size_t r = 0; r < rows_.size(); r++) {
    if (options_.layout == moecclLayoutExpertMajor) {
      const float expected = rows_[r].choices.empty() ? 0 : rows_[r].choices[0].weight;
      wrong += info.choice_weight[r] != expected;
      continue;
    }
    wrong += info.choice_offsets[r] != static_cast<int64_t>(at);
    for (const Choice& c : rows_[r].choices) {
      wrong += info.choice_expert[at] != c.local_expert || info.choice_weight[at] != c.weight;
      at++;
    }
  }
  return wrong;
}

uint64_t Oracle::check_info(const moecclRoutingInfo_t& info) const {
  const size_t n_local = local_experts_.size();
  // Do not read further when the arrays have another length.
  if (info.n_rows != rows_.size() || static_cast<size_t>(info.n_local_experts) != n_local) return 1;
  std::map<std::pair<int32_t, int32_t>, int> unique;
  uint64_t wrong = 0, n_dropped = 0;
  for (size_t r = 0; r < rows_.size(); r++) {
    wrong += info.row_source[r] != rows_[r].source || info.row_token[r] != rows_[r].token;
    if (rows_[r].source >= 0) unique[{rows_[r].source, rows_[r].token}]++;
  }
  for (size_t e = 0; e < n_local; e++) {
    wrong += info.local_experts[e] != local_experts_[e];
    wrong += info.expert_counts[e] != expert_counts_[e];
  }
  if (options_.layout == moecclLayoutExpertMajor)
    for (size_t e = 0; e <= n_local; e++) wrong += info.expert_offsets[e] != expert_offsets_[e];
  for (size_t e = 0; e < drop_counts_.size(); e++) {
    wrong += info.drop_counts[e] != drop_counts_[e];
    n_dropped += static_cast<uint64_t>(drop_counts_[e]);
  }
  const size_t n_tokens = routing_[static_cast<size_t>(rank_)].n_tokens;
  wrong += info.n_tokens != n_tokens;
  wrong += info.n_unique != unique.size();
  wrong += info.n_dropped != n_dropped;
  wrong += info.logical_bytes != n_tokens * k_ * row_bytes_;
  return wrong + check_choices(info);
}

const int8_t* Oracle::output_values(int32_t source, size_t token, int32_t expert) const {
  const uint64_t who = static_cast<uint64_t>(source) << 32 | token;
  return values_.data() + mix(kOutputs, who, static_cast<uint64_t>(expert)) % kWindows;
}

const int8_t* Oracle::gradient_values(int32_t source, size_t token) const {
  return values_.data() + mix(kGradients, static_cast<uint64_t>(source) << 32 | token) % kWindows;
}

void Oracle::write(const Halves& values, char* row) const {
  for (size_t i = 0; i < values.size(); i++)
    std::memcpy(row + i * type_.bytes, &encoded_[static_cast<size_t>(values[i] + encoded_zero_) * type_.bytes],
                type_.bytes);
}

bool Oracle::differs(const Halves& values, const char* row, std::vector<char>& scratch) const {
  scratch.resize(row_bytes_);
  write(values, scratch.data());
  return std::memcmp(scratch.data(), row, row_bytes_) != 0;
}

void Oracle::stamp(int32_t source, size_t token, char* row) const {
  const uint32_t id[2] = {static_cast<uint32_t>(source), static_cast<uint32_t>(token)};
  std::memcpy(row, id, std::min(sizeof id, row_bytes_));
}

namespace {

void add(std::vector<int32_t>& sum, const int8_t* values, int32_t halves) {
  for (size_t i = 0; i < sum.size(); i++) sum[i] += halves * values[i];
}

int32_t in_halves(float weight) { return weight == 0.5f ? 1 : 2; }

}  // namespace

void Oracle::fill_gradients(char* in) const {
  for (size_t t = 0; t < routing_[static_cast<size_t>(rank_)].n_tokens; t++) {
    Halves row(options_.hidden);
    add(row, gradient_values(rank_, t), 2);
    write(row, in + t * row_bytes_);
  }
}

void Oracle::fill_tokens(char* in) const {
  fill_gradients(in);
  for (size_t t = 0; t < routing_[static_cast<size_t>(rank_)].n_tokens; t++) stamp(rank_, t, in + t * row_bytes_);
}

uint64_t Oracle::check_rows(const char* out) const {
  uint64_t wrong = 0;
  std::vector<char> expected(row_bytes_);
  for (size_t r = 0; r < rows_.size(); r++) {
    const Row& row = rows_[r];
    std::fill(expected.begin(), expected.end(), '\0');
    if (row.source >= 0) {
      Halves values(options_.hidden);
      add(values, gradient_values(row.source, static_cast<size_t>(row.token)), 2);
      write(values, expected.data());
      stamp(row.source, static_cast<size_t>(row.token), expected.data());
    }
    wrong += std::memcmp(expected.data(), out + r * row_bytes_, row_bytes_) != 0;
  }
  return wrong;
}

void Oracle::fill_outputs(char* in) const {
  const bool weigh = options_.layout == moecclLayoutRows;
  for (size_t r = 0; r < rows_.size(); r++) {
    const Row& row = rows_[r];
    if (row.source < 0) {
      std::memset(in + r * row_bytes_, 0xff, row_bytes_);  // padding, which must not be read
      continue;
    }
    Halves sum(options_.hidden);
    for (const Choice& c : row.choices)
      add(sum, output_values(row.source, static_cast<size_t>(row.token), c.expert), weigh ? in_halves(c.weight) : 2);
    write(sum, in + r * row_bytes_);
  }
}

uint64_t Oracle::check_tokens(const char* out, bool weighted) const {
  const RankRouting& mine = routing_[static_cast<size_t>(rank_)];
  const bool weigh = weighted || options_.layout == moecclLayoutRows;
  uint64_t wrong = 0;
  std::vector<char> scratch;
  for (size_t t = 0; t < mine.n_tokens; t++) {
    Halves sum(options_.hidden);
    for (size_t j = t * k_; j < (t + 1) * k_; j++)
      if (mine.index[j] >= 0 && !dropped_[static_cast<size_t>(rank_)][j])
        add(sum, output_values(rank_, t, mine.index[j]), weigh ? in_halves(mine.weight[j]) : 2);
    wrong += differs(sum, out + t * row_bytes_, scratch);
  }
  return wrong;
}

uint64_t Oracle::check_gradient_rows(const char* out) const {
  uint64_t wrong = 0;
  std::vector<char> scratch;
  for (size_t r = 0; r < rows_.size(); r++) {
    const Row& row = rows_[r];
    Halves values(options_.hidden);
    if (row.source >= 0) {
      const bool weigh = options_.layout == moecclLayoutExpertMajor;
      add(values, gradient_values(row.source, static_cast<size_t>(row.token)),
          weigh ? in_halves(row.choices[0].weight) : 2);
    }
    wrong += differs(values, out + r * row_bytes_, scratch);
  }
  return wrong;
}

uint64_t Oracle::check_gradient_weights(const float* weights) const {
  const RankRouting& mine = routing_[static_cast<size_t>(rank_)];
  uint64_t wrong = 0;
  for (size_t i = 0; i < mine.index.size(); i++) {
    int64_t product = 0;
    if (mine.index[i] >= 0 && !dropped_[static_cast<size_t>(rank_)][i]) {
      const int8_t* output = output_values(rank_, i / k_, mine.index[i]);
      const int8_t* gradient = gradient_values(rank_, i / k_);
      for (size_t e = 0; e < options_.hidden; e++) product += output[e] * gradient[e];
    }
    wrong += weights[i] != static_cast<float>(product);
  }
  return wrong;
}

}  // namespace perf
