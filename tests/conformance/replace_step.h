// SPDX-License-Identifier: Apache-2.0
// One step of the re-placing combine on a rank, forward and backward, compared with sums that are formed one by one.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

struct ReplaceShape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  int top_k, n_experts;
  size_t width, sample;
  std::vector<size_t> samples;  // of each rank
  std::vector<int32_t> owner = {};
  bool in_turn = false;  // every algorithm and kind of residual in one of the layouts, both layouts with each of them
};
inline std::ostream& operator<<(std::ostream& out, const ReplaceShape& s) { return out << s.name; }

// The data that every rank knows: small integers and weights of halves, so that sums are exact in any order.
struct ReplaceTruth {
  const ReplaceShape& shape;
  uint64_t step;
  std::vector<size_t> first;  // the first sample of each rank
  ReplaceTruth(const ReplaceShape& s, uint64_t n) : shape(s), step(n), first{0} {
    for (const size_t count : s.samples) first.push_back(first.back() + count);
  }
  size_t n_tokens(int rank) const { return shape.samples[static_cast<size_t>(rank)] * shape.sample; }
  size_t number(int rank, size_t token) const { return first[static_cast<size_t>(rank)] * shape.sample + token; }
  static uint64_t mix(uint64_t x) { return (x ^ (x >> 31)) * 0x9e3779b97f4a7c15u ^ (x >> 7); }
  uint64_t draw(uint64_t a, uint64_t b) const { return mix(mix(mix(step * 977 + a) + b) + 12345) >> 13; }
  // Experts are distinct, and some are none. A sample prefers a few experts. Occasionally a token has no expert at all.
  int32_t expert(size_t token, int k) const {
    if (draw(token, 7) % 5 == 0 || draw(token, 100 + static_cast<uint64_t>(k)) % 7 == 0) return -1;
    const uint64_t base = draw(token / shape.sample, 3) + draw(token, 9) % 2;
    return static_cast<int32_t>((base + static_cast<uint64_t>(k)) % static_cast<uint64_t>(shape.n_experts));
  }
  float weight(size_t token, int k) const {
    return 0.5f * static_cast<float>(1 + draw(token, 50 + static_cast<uint64_t>(k)) % 3);
  }
  float x(size_t token, size_t i) const { return static_cast<float>(draw(token, 1000 + i) % 9) - 4; }
  float y(size_t token, int32_t e, size_t i) const {
    return static_cast<float>(draw(token * 64 + static_cast<size_t>(e), 2000 + i) % 9) - 4;
  }
  float g(size_t token, size_t i) const { return static_cast<float>(draw(token, 3000 + i) % 9) - 4; }
};

struct ReplaceCase {
  moecclMoeLayout_t layout;
  const char* algorithm;
  int residual;  // as in the config
  moecclReplaceMode_t mode;
  int next;
};

class ReplaceStep {
 public:
  ReplaceStep(const ReplaceTruth& truth, const ReplaceCase& c, int rank, moecclComm_t comm_)
      : t(truth), c(c), rank(rank), comm(comm_) {}

  void run(moecclMoe_t moe, moecclReplacement_t replacement) {
    const size_t tokens = t.n_tokens(rank);
    const auto k = static_cast<size_t>(t.shape.top_k);
    std::vector<int32_t> index(tokens * k + 1);
    std::vector<float> weight(tokens * k + 1);
    for (size_t i = 0; i < tokens * k; ++i) {
      index[i] = t.expert(t.number(rank, i / k), static_cast<int>(i % k));
      weight[i] = t.weight(t.number(rank, i / k), static_cast<int>(i % k));
    }
    moecclRouting_t routing = nullptr;
    MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), tokens), comm);
    std::vector<int32_t> next(t.shape.samples[static_cast<size_t>(rank)] * static_cast<size_t>(t.shape.n_experts) + 1,
                              3);
    if (c.next == 2) next = index;
    std::vector<int32_t> given;  // reversed, which keeps the counts where all ranks have equally many samples
    for (size_t i = 0; i < t.first.back(); ++i) given.push_back(home_of(t.first.back() - 1 - i));
    given.push_back(0);
    MOECCL_ASSERT_COMM_OK(moecclReplaceBegin(replacement, routing, c.next ? next.data() : nullptr,
                                             c.mode == moecclReplaceGiven ? given.data() : nullptr),
                          comm);
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
    forward(routing, replacement);
    if (::testing::Test::HasFatalFailure()) return;
    backward(routing, replacement);
    MOECCL_ASSERT_COMM_OK(moecclRoutingDestroy(routing), comm);
  }

  moecclReplaceInfo_t facts{};

 private:
  int32_t home_of(size_t sample) const {
    return static_cast<int32_t>(std::upper_bound(t.first.begin(), t.first.end(), sample) - t.first.begin() - 1);
  }
  size_t width() const { return t.shape.width; }
  size_t token_of_row(size_t row) const {
    return t.number(info.row_source[row], static_cast<size_t>(info.row_token[row]));
  }

  void forward(moecclRouting_t routing, moecclReplacement_t replacement) {
    const size_t tokens = t.n_tokens(rank);
    std::vector<float> x(tokens * width() + 1), dispatched(info.n_rows * width() + 1, -9);
    for (size_t i = 0; i < tokens * width(); ++i) x[i] = t.x(t.number(rank, i / width()), i % width());
    MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, x.data(), dispatched.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceRows(replacement, &n_rows), comm);
    ASSERT_GE(n_rows, info.n_rows);
    if (c.residual == 2) {
      ASSERT_EQ(n_rows, info.n_rows + tokens);
    }
    in.assign(n_rows * width() + 1, -77);
    for (size_t row = 0; row < info.n_rows; ++row)
      if (info.row_source[row] >= 0) fill_row(row);
    if (c.residual) {
      // Rows of the caller come from x alone.
      MOECCL_ASSERT_COMM_OK(
          moecclReplaceResidual(replacement, x.data(), c.residual == 2 ? nullptr : dispatched.data(), in.data()), comm);
    }
    std::vector<float> out(tokens * width() + 1, -55);
    MOECCL_ASSERT_COMM_OK(moecclReplaceCombine(replacement, in.data(), out.data(), nullptr), comm);
    facts.size = sizeof(facts);
    MOECCL_ASSERT_COMM_OK(moecclReplaceGetInfo(replacement, &facts), comm);
    check_facts();
    size_t wrong = 0;
    for (size_t i = 0; i < tokens; ++i) {
      for (size_t j = 0; j < width(); ++j) wrong += out[i * width() + j] != wanted(now(i), j);
    }
    EXPECT_EQ(wrong, 0u) << "of " << tokens << " tokens at their new homes";
    EXPECT_EQ(out.back(), -55) << "written beyond the tokens";
  }
  // Returns the number of the i-th token that is here now.
  size_t now(size_t i) const {
    return static_cast<size_t>(facts.local_samples[i / t.shape.sample]) * t.shape.sample + i % t.shape.sample;
  }
  float wanted(size_t token, size_t j) const {
    float sum = c.residual ? t.x(token, j) : 0;
    for (int k = 0; k < t.shape.top_k; ++k)
      if (t.expert(token, k) >= 0) sum += t.weight(token, k) * t.y(token, t.expert(token, k), j);
    return sum;
  }
  void fill_row(size_t row) {
    const size_t token = token_of_row(row);
    if (c.layout == moecclLayoutExpertMajor) {
      int32_t e = 0;
      while (info.expert_offsets[e + 1] <= static_cast<int64_t>(row)) ++e;
      for (size_t j = 0; j < width(); ++j) in[row * width() + j] = t.y(token, info.local_experts[e], j);
      return;
    }
    for (size_t j = 0; j < width(); ++j) {
      float sum = 0;
      for (int64_t i = info.choice_offsets[row]; i < info.choice_offsets[row + 1]; ++i)
        sum += info.choice_weight[i] * t.y(token, info.local_experts[info.choice_expert[i]], j);
      in[row * width() + j] = sum;
    }
  }
  void check_facts() {
    ASSERT_EQ(static_cast<size_t>(facts.n_samples), t.first.back());
    ASSERT_EQ(static_cast<size_t>(facts.n_local), t.shape.samples[static_cast<size_t>(rank)]);
    if (c.mode == moecclReplaceKeep) {
      EXPECT_EQ(facts.moved, 0);
    }
    EXPECT_STREQ(facts.algorithm, info.algorithm);
    for (int32_t i = 0; i < facts.n_local; ++i) EXPECT_EQ(facts.placement[facts.local_samples[i]], rank);
    uint64_t sent = 0;
    MOECCL_ASSERT_COMM_OK(moecclAllReduce(&facts.node_bytes_sent, &sent, 1, moecclUint64, moecclSum, comm, nullptr),
                          comm);
    if (facts.skipped) return;
    EXPECT_EQ(sent, facts.node_bytes_after) << facts.algorithm;
    // The next layer routes like this one, so both terms of Eq. 5 have one unit. A residual's rows belong only to the
    // combine.
    if (c.next == 2 && c.residual == 0) {
      EXPECT_EQ(facts.next_bytes_before, facts.node_bytes_before) << facts.algorithm;
      EXPECT_EQ(facts.next_bytes_after, facts.node_bytes_after) << facts.algorithm;
    }
    if (c.mode == moecclReplaceSolve && !c.next) {
      EXPECT_LE(facts.node_bytes_after, facts.node_bytes_before);
    }
  }

  void backward(moecclRouting_t routing, moecclReplacement_t replacement) {
    const size_t tokens = t.n_tokens(rank);
    const auto k = static_cast<size_t>(t.shape.top_k);
    const bool expert_major = c.layout == moecclLayoutExpertMajor;
    std::vector<float> grad_out(tokens * width() + 1), grad_in(n_rows * width() + 1, -33),
        grad_weight(tokens * k + 1, -3);
    for (size_t i = 0; i < tokens * width(); ++i) grad_out[i] = t.g(now(i / width()), i % width());
    MOECCL_ASSERT_COMM_OK(
        moecclReplaceCombineBackward(replacement, grad_out.data(), grad_in.data(), expert_major ? in.data() : nullptr,
                                     expert_major ? grad_weight.data() : nullptr, nullptr),
        comm);
    size_t wrong = 0;
    for (size_t row = 0; row < info.n_rows; ++row) {
      if (info.row_source[row] < 0) continue;
      const float w = expert_major ? info.choice_weight[row] : 1;
      for (size_t j = 0; j < width(); ++j) wrong += grad_in[row * width() + j] != w * t.g(token_of_row(row), j);
    }
    EXPECT_EQ(wrong, 0u) << "gradients of experts' rows";
    for (size_t i = 0; expert_major && i < tokens * k; ++i) {
      const size_t token = t.number(rank, i / k);
      const int32_t e = t.expert(token, static_cast<int>(i % k));
      float want = 0;
      for (size_t j = 0; e >= 0 && j < width(); ++j) want += t.g(token, j) * t.y(token, e, j);
      wrong += grad_weight[i] != want;
    }
    EXPECT_EQ(wrong, 0u) << "gradients of weights";
    if (!c.residual) return;
    // Experts that pass nothing back leave only the residual's gradient, which returns to the token that it came from.
    std::vector<float> rows(info.n_rows * width() + 1, 0), grad_x(tokens * width() + 1, -1);
    MOECCL_ASSERT_COMM_OK(moecclReplaceResidualBackward(replacement, grad_in.data(), rows.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclDispatchBackward(routing, rows.data(), grad_x.data(), nullptr), comm);
    MOECCL_ASSERT_COMM_OK(moecclReplaceResidualBackward(replacement, grad_in.data(), nullptr, grad_x.data()), comm);
    for (size_t i = 0; i < tokens * width(); ++i) wrong += grad_x[i] != t.g(t.number(rank, i / width()), i % width());
    EXPECT_EQ(wrong, 0u) << "gradients of the residual";
  }

  const ReplaceTruth& t;
  const ReplaceCase& c;
  int rank;
  moecclComm_t comm;
  moecclRoutingInfo_t info{};
  size_t n_rows = 0;
  std::vector<float> in;
};

inline moecclMoeConfig_t layer_of(const ReplaceShape& s, const ReplaceCase& c) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = s.width * sizeof(float);
  config.type = moecclFloat32;
  config.top_k = s.top_k;
  config.n_experts = s.n_experts;
  config.expert_rank = s.owner.empty() ? nullptr : s.owner.data();
  config.max_tokens = *std::max_element(s.samples.begin(), s.samples.end()) * s.sample;
  config.layout = c.layout;
  config.align_rows = c.layout == moecclLayoutExpertMajor ? 2 : 0;
  config.algorithm = c.algorithm;
  return config;
}

}  // namespace moeccl::testing
