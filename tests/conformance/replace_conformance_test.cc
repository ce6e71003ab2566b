// SPDX-License-Identifier: Apache-2.0
// The re-placing combine through the C interface, compared with sums that are formed one by one: every algorithm and
// layout, with and without residual, uneven nodes, ranks without tokens or experts, odd rows; its backward pass; and
// calls that must be refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <numeric>
#include <thread>
#include <tuple>

#include "moeccl/moeccl.h"
#include "tests/conformance/two_experts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

struct Shape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  int top_k, n_experts;
  size_t width, sample;
  std::vector<size_t> samples;  // of each rank
  std::vector<int32_t> owner = {};
};
std::ostream& operator<<(std::ostream& out, const Shape& s) { return out << s.name; }

const Shape kShapes[] = {
    {"OneRank", 1, RankMode::kThreads, "", 2, 4, 7, 3, {4}},
    {"TwoNodesOfTwo", 4, RankMode::kProcesses, "node:2 gpu:2", 3, 8, 16, 5, {4, 4, 4, 4}},
    {"TwoHostsOfOne", 2, RankMode::kProcesses, "node:2 gpu:1", 2, 6, 8, 3, {3, 2}},
    {"Uneven3And4", 7, RankMode::kMixed, "node:2 gpu:3+4", 2, 10, 9, 2, {3, 0, 5, 1, 4, 0, 6}},
    {"ExpertsOnTwoRanks", 5, RankMode::kThreads, "node:2 gpu:2+3", 2, 6, 33, 4, {2, 3, 0, 4, 1}, {1, 4, 1, 4, 4, 1}},
    {"NoTokensAtAll", 3, RankMode::kThreads, "", 2, 6, 8, 4, {0, 0, 0}},
    {"SixteenRanks", 16, RankMode::kThreads, "node:4 gpu:4", 4, 32, 8, 2, std::vector<size_t>(16, 3)},
};

// The data that every rank knows: small integers and weights of halves, so that sums are exact in any order.
struct Truth {
  const Shape& shape;
  uint64_t step;
  std::vector<size_t> first;  // the first sample of each rank
  Truth(const Shape& s, uint64_t n) : shape(s), step(n), first{0} {
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

struct Case {
  moecclMoeLayout_t layout;
  const char* algorithm;
  int residual;  // as in the config
  moecclReplaceMode_t mode;
  int next;
};

#define COMM_OK(call) ASSERT_EQ(call, moecclSuccess) << moecclGetLastError(comm)

class Step {
 public:
  Step(const Truth& truth, const Case& c, int rank, moecclComm_t comm_) : t(truth), c(c), rank(rank), comm(comm_) {}

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
    COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), weight.data(), tokens));
    std::vector<int32_t> next(t.shape.samples[static_cast<size_t>(rank)] * static_cast<size_t>(t.shape.n_experts) + 1,
                              3);
    if (c.next == 2) next = index;
    std::vector<int32_t> given;  // reversed, which keeps the counts where all ranks have equally many samples
    for (size_t i = 0; i < t.first.back(); ++i) given.push_back(home_of(t.first.back() - 1 - i));
    given.push_back(0);
    COMM_OK(moecclReplaceBegin(replacement, routing, c.next ? next.data() : nullptr,
                               c.mode == moecclReplaceGiven ? given.data() : nullptr));
    info.size = sizeof(info);
    COMM_OK(moecclRoutingGetInfo(routing, &info));
    forward(routing, replacement);
    if (::testing::Test::HasFatalFailure()) return;
    backward(routing, replacement);
    COMM_OK(moecclRoutingDestroy(routing));
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
    COMM_OK(moecclDispatch(routing, x.data(), dispatched.data(), nullptr));
    COMM_OK(moecclReplaceRows(replacement, &n_rows));
    ASSERT_GE(n_rows, info.n_rows);
    if (c.residual == 2) {
      ASSERT_EQ(n_rows, info.n_rows + tokens);
    }
    in.assign(n_rows * width() + 1, -77);
    for (size_t row = 0; row < info.n_rows; ++row)
      if (info.row_source[row] >= 0) fill_row(row);
    if (c.residual) {
      // Rows of the caller come from x alone.
      COMM_OK(moecclReplaceResidual(replacement, x.data(), c.residual == 2 ? nullptr : dispatched.data(), in.data()));
    }
    std::vector<float> out(tokens * width() + 1, -55);
    COMM_OK(moecclReplaceCombine(replacement, in.data(), out.data(), nullptr));
    facts.size = sizeof(facts);
    COMM_OK(moecclReplaceGetInfo(replacement, &facts));
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
    COMM_OK(moecclAllReduce(&facts.node_bytes_sent, &sent, 1, moecclUint64, moecclSum, comm, nullptr));
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
    COMM_OK(moecclReplaceCombineBackward(replacement, grad_out.data(), grad_in.data(),
                                         expert_major ? in.data() : nullptr,
                                         expert_major ? grad_weight.data() : nullptr, nullptr));
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
    COMM_OK(moecclReplaceResidualBackward(replacement, grad_in.data(), rows.data(), nullptr));
    COMM_OK(moecclDispatchBackward(routing, rows.data(), grad_x.data(), nullptr));
    COMM_OK(moecclReplaceResidualBackward(replacement, grad_in.data(), nullptr, grad_x.data()));
    for (size_t i = 0; i < tokens * width(); ++i) wrong += grad_x[i] != t.g(t.number(rank, i / width()), i % width());
    EXPECT_EQ(wrong, 0u) << "gradients of the residual";
  }

  const Truth& t;
  const Case& c;
  int rank;
  moecclComm_t comm;
  moecclRoutingInfo_t info{};
  size_t n_rows = 0;
  std::vector<float> in;
};

moecclMoeConfig_t layer_of(const Shape& s, const Case& c) {
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

void run_case(const Shape& shape, const Case& c, int rank, moecclComm_t comm) {
  const moecclMoeConfig_t config = layer_of(shape, c);
  const char* topology = shape.topology[0] == 0 ? nullptr : shape.topology;
  char why[300];
  if (moecclMoeCheck(&config, shape.n, topology, why, sizeof(why)) != moecclSuccess) return;  // too few levels
  moecclMoe_t moe = nullptr;
  moecclReplacement_t replacement = nullptr;
  moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
  replace.sample_tokens = shape.sample;
  replace.mode = c.mode;
  replace.residual = c.residual;
  replace.use_next = c.next;
  replace.min_gain = -1;
  COMM_OK(moecclMoeCreate(&moe, comm, &config));
  COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
  for (uint64_t step = 0; step < 2 && !::testing::Test::HasFatalFailure(); ++step) {
    const Truth truth(shape, step);
    Step(truth, c, rank, comm).run(moe, replacement);
  }
  EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess) << moecclGetLastError(nullptr);
  EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
}

class ReplaceConformance : public ::testing::TestWithParam<Shape> {};

TEST_P(ReplaceConformance, EverySampleArrivesAtItsNewHome) {
  const Shape& shape = GetParam();
  RankOptions options{.mode = shape.mode, .deadline_ms = 120'000};
  options.config.topology = shape.topology[0] == 0 ? nullptr : shape.topology;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        for (const moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
          for (const char* algorithm : {"flat", "2dh", "hier:1", "hier:2", "auto"}) {
            for (const int residual : {0, 1, 2}) {
              const moecclReplaceMode_t mode = residual == 1 ? moecclReplaceSolve : moecclReplaceGiven;
              SCOPED_TRACE(std::string(layout == moecclLayoutRows ? "rows, " : "expert-major, ") + algorithm);
              // A reversed placement keeps the counts only where all ranks have equally many samples.
              const bool even = std::adjacent_find(shape.samples.begin(), shape.samples.end(), std::not_equal_to<>()) ==
                                shape.samples.end();
              run_case(
                  shape,
                  {layout, algorithm, residual, even ? mode : moecclReplaceSolve, residual == 1 ? (even ? 1 : 0) : 2},
                  rank, comm);
              if (::testing::Test::HasFatalFailure()) return;
            }
          }
        }
        run_case(shape, {moecclLayoutExpertMajor, "flat", 1, moecclReplaceKeep, 0}, rank, comm);
      },
      options);
}

INSTANTIATE_TEST_SUITE_P(Shapes, ReplaceConformance, ::testing::ValuesIn(kShapes),
                         [](const ::testing::TestParamInfo<Shape>& info) { return info.param.name; });

// Where all links are equally fast, the gain of a uniform routing is small: samples stay, after a few steps Begin
// exchanges nothing, and every kind of residual still arrives.
TEST(ReplaceGain, WhatDoesNotPayIsSkippedAndComesOutTheSame) {
  const Shape shape{"Skips", 4, RankMode::kThreads, "node:2 gpu:2", 2, 8, 8, 3, {4, 4, 4, 4}};
  RankOptions options{.mode = shape.mode, .deadline_ms = 120'000};
  options.config.topology = shape.topology;
  run_ranks(
      shape.n,
      [&](int rank, moecclComm_t comm) {
        for (const int residual : {0, 1, 2}) {
          for (const moecclMoeLayout_t layout : {moecclLayoutRows, moecclLayoutExpertMajor}) {
            const Case c{layout, "hier:2", residual, moecclReplaceSolve, 0};
            const moecclMoeConfig_t config = layer_of(shape, c);
            moecclMoe_t moe = nullptr;
            moecclReplacement_t replacement = nullptr;
            moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
            replace.sample_tokens = shape.sample;
            replace.residual = residual;
            replace.min_gain = 0.99;
            COMM_OK(moecclMoeCreate(&moe, comm, &config));
            COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
            int skipped = 0;
            for (uint64_t step = 0; step < 12 && !::testing::Test::HasFatalFailure(); ++step) {
              const Truth truth(shape, step);
              Step one(truth, c, rank, comm);
              one.run(moe, replacement);
              EXPECT_EQ(one.facts.keep, 1);
              EXPECT_EQ(one.facts.moved, 0);
              skipped += one.facts.skipped;
            }
            EXPECT_GE(skipped, 8) << "of 12 steps";
            EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
            EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
          }
        }
      },
      options);
}

// In a skipped step, a wrong argument is one rank's own affair: it calls again and is where the others are.
TEST(ReplaceGain, AWrongCallInASkippedStepIsRepeated) {
  const Shape shape{"Repeats", 2, RankMode::kThreads, "", 2, 4, 8, 3, {4, 4}};
  run_ranks(shape.n, [&](int rank, moecclComm_t comm) {
    const Case c{moecclLayoutRows, "flat", 0, moecclReplaceSolve, 2};
    const moecclMoeConfig_t config = layer_of(shape, c);
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = shape.sample;
    replace.use_next = c.next;
    replace.min_gain = 0.99;
    moecclMoe_t moe = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclRouting_t routing = nullptr;
    COMM_OK(moecclMoeCreate(&moe, comm, &config));
    COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
    const std::vector<int32_t> none(config.max_tokens * static_cast<size_t>(shape.top_k), -1);
    COMM_OK(moecclRoutingCreate(&routing, moe, none.data(), nullptr, config.max_tokens));
    int skipped = 0;
    for (uint64_t step = 0; step < 16 && !::testing::Test::HasFatalFailure(); ++step) {
      // Step 0 asks, and the next four are skipped.
      if (rank == 1 && step == 2) {
        EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, nullptr), moecclInvalidArgument);
      }
      const Truth truth(shape, step);
      Step one(truth, c, rank, comm);
      one.run(moe, replacement);
      skipped += one.facts.skipped;
    }
    EXPECT_EQ(skipped, 13) << "of 16 steps: 4, 8 and the first of 16";
    COMM_OK(moecclRoutingDestroy(routing));
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// Rank 1 comes late to the combine of a skipped step, which is then still on rank 0's stream when the next step begins
// with another routing.
TEST(ReplaceGain, ASkippedStepWaitsForTheListsOfTheLast) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    constexpr size_t kTokens = 64, kWidth = 8;
    const moecclMoeConfig_t config = two_experts(kTokens, kWidth, moecclLayoutRows);
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = 4;
    replace.residual = 2;
    replace.min_gain = 0.99;
    moecclMoe_t moe = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclStream_t stream = nullptr;
    COMM_OK(moecclMoeCreate(&moe, comm, &config));
    COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
    COMM_OK(moecclStreamCreate(&stream));
    std::vector<int32_t> both(kTokens), one(4, 0);
    for (size_t i = 0; i < both.size(); ++i) both[i] = static_cast<int32_t>(i % 2);
    moecclRouting_t first = nullptr, second = nullptr;
    COMM_OK(moecclRoutingCreate(&first, moe, both.data(), nullptr, both.size()));
    COMM_OK(moecclRoutingCreate(&second, moe, one.data(), nullptr, one.size()));
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    COMM_OK(moecclRoutingGetInfo(first, &info));
    std::vector<float> x(kTokens * kWidth), rows((info.n_rows + 1) * kWidth), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(1000 * rank) + static_cast<float>(i);
    // The experts return what they get, so a token comes back twice: from its expert and as its residual.
    const auto fill = [&](std::vector<float>& in) {
      COMM_OK(moecclDispatch(first, x.data(), rows.data(), nullptr));
      size_t n_rows = 0;
      COMM_OK(moecclReplaceRows(replacement, &n_rows));
      in.assign((n_rows + 1) * kWidth, -7);
      std::copy_n(rows.begin(), info.n_rows * kWidth, in.begin());
      COMM_OK(moecclReplaceResidual(replacement, x.data(), nullptr, in.data()));
    };
    std::vector<float> in;
    moecclReplaceInfo_t facts{};
    facts.size = sizeof(facts);
    COMM_OK(moecclReplaceBegin(replacement, first, nullptr, nullptr));
    fill(in);
    COMM_OK(moecclReplaceCombine(replacement, in.data(), out.data(), nullptr));
    COMM_OK(moecclReplaceBegin(replacement, first, nullptr, nullptr));
    COMM_OK(moecclReplaceGetInfo(replacement, &facts));
    ASSERT_EQ(facts.skipped, 1);
    fill(in);
    std::fill(out.begin(), out.end(), -1.0f);
    if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    COMM_OK(moecclReplaceCombine(replacement, in.data(), out.data(), stream));
    COMM_OK(moecclReplaceBegin(replacement, second, nullptr, nullptr));
    COMM_OK(moecclReplaceGetInfo(replacement, &facts));
    EXPECT_EQ(facts.skipped, 1);
    COMM_OK(moecclStreamSynchronize(stream));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], 2 * x[i]) << "element " << i;
    COMM_OK(moecclRoutingDestroy(first));
    COMM_OK(moecclRoutingDestroy(second));
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
    EXPECT_EQ(moecclStreamDestroy(stream), moecclSuccess);
  });
}

moecclMoeConfig_t two_experts(size_t max_tokens) {
  moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
  config.hidden_bytes = 16;
  config.type = moecclFloat32;
  config.top_k = 1;
  config.n_experts = 2;
  config.max_tokens = max_tokens;
  return config;
}

TEST(ReplaceUsage, WhatCannotWorkIsRefusedOnAllRanks) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const moecclMoeConfig_t config = two_experts(8);
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    COMM_OK(moecclMoeCreate(&moe, comm, &config));
    replace.sample_tokens = 4;
    replace.mode = moecclReplaceGiven;
    COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
    size_t rows = 0;
    EXPECT_EQ(moecclReplaceRows(replacement, &rows), moecclInvalidUsage);
    const int32_t index[8] = {0, 1, 0, 1, 0, 1, 0, 1};
    COMM_OK(moecclRoutingCreate(&routing, moe, index, nullptr, rank == 0 ? 8 : 6));
    const int32_t homes[3] = {0, 0, 1}, other[3] = {0, 1, 0}, many[3] = {1, 1, 1};
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, homes), moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("rank 1 has 6 tokens"), std::string::npos);
    COMM_OK(moecclRoutingUpdate(routing, index, nullptr, rank == 0 ? 8 : 4));
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, many), moecclInvalidArgument);
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, rank == 0 ? homes : other), moecclMismatch);
    COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, homes));
    COMM_OK(moecclReplaceRows(replacement, &rows));
    EXPECT_EQ(moecclReplaceResidual(replacement, nullptr, nullptr, nullptr), moecclInvalidUsage);
    COMM_OK(moecclRoutingUpdate(routing, index, nullptr, 4));
    EXPECT_EQ(moecclReplaceRows(replacement, &rows), moecclInvalidUsage);
    COMM_OK(moecclRoutingDestroy(routing));
    EXPECT_EQ(moecclReplaceRows(replacement, &rows), moecclInvalidUsage);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclInvalidArgument);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// What only the solver refused would end the communicator on all ranks, in the middle of a step.
TEST(ReplaceUsage, WhatTheSolverCannotTakeIsRefusedBeforeIt) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = two_experts(8);
    config.layout = moecclLayoutExpertMajor;
    config.algorithm = "flat";
    moecclMoe_t moe = nullptr;
    COMM_OK(moecclMoeCreate(&moe, comm, &config));
    const auto says = [&](const char* text) {
      EXPECT_NE(std::string(moecclGetLastError(comm)).find(text), std::string::npos) << moecclGetLastError(comm);
    };
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.sample_tokens = 4;
    moecclReplacement_t replacement = nullptr;
    replace.min_gain = -INFINITY;
    EXPECT_EQ(moecclReplaceCreate(&replacement, moe, &replace), moecclInvalidArgument);
    says("config.min_gain is -inf");
    replace.min_gain = -1;
    replace.use_next = 1;
    COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
    const int32_t index[4] = {0, 1, 0, 1};
    moecclRouting_t routing = nullptr;
    COMM_OK(moecclRoutingCreate(&routing, moe, index, nullptr, 4));
    constexpr int32_t kMost = (1 << 30) - 1;  // rows of a sample, in both operations together
    const int32_t good[2] = {kMost - 4, 0}, bad[2] = {kMost - 4, 1};
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, rank == 0 ? good : bad, nullptr),
              rank == 0 ? moecclRemoteError : moecclInvalidArgument);
    says(rank == 0 ? "rank 1" : "next of sample 0 of this rank counts 1073741820 rows: at most 1073741819");
    COMM_OK(moecclReplaceBegin(replacement, routing, good, nullptr));
    moecclReplaceInfo_t facts{};
    facts.size = sizeof(facts);
    COMM_OK(moecclReplaceGetInfo(replacement, &facts));
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    replace.use_next = 2;
    COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, nullptr), moecclInvalidArgument);
    says("config.use_next is 2: give next_index[4][1]");
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    COMM_OK(moecclRoutingDestroy(routing));
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// Counts of 128 samples for 4096 experts, in this layer and the next, are larger than all tables.
TEST(ReplaceUsage, TheCapCoversTheSolversCounts) {
  constexpr int kTokens = 64, kExperts = 4096;
  run_ranks(2, [](int rank, moecclComm_t comm) {
    moecclMoeConfig_t config = two_experts(kTokens);
    config.n_experts = kExperts;
    config.layout = moecclLayoutExpertMajor;
    config.algorithm = "flat";
    std::vector<int32_t> index(kTokens, rank), next(kTokens * kExperts);
    for (const auto& [cap, use_next, expected] : {std::tuple{size_t{3} << 20, 0, moecclSuccess},
                                                  {size_t{5} << 20, 1, moecclOutOfMemory},
                                                  {size_t{9} << 20, 1, moecclSuccess}}) {
      config.memory_cap_bytes = cap;
      moecclMoe_t moe = nullptr;
      moecclRouting_t routing = nullptr;
      moecclReplacement_t replacement = nullptr;
      moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
      replace.use_next = use_next;
      COMM_OK(moecclMoeCreate(&moe, comm, &config));
      COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
      COMM_OK(moecclRoutingCreate(&routing, moe, index.data(), nullptr, kTokens));
      ASSERT_EQ(moecclReplaceBegin(replacement, routing, use_next ? next.data() : nullptr, nullptr), expected)
          << cap << ", " << use_next << ": " << moecclGetLastError(comm);
      COMM_OK(moecclRoutingDestroy(routing));
      EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
      EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
    }
  });
}

// The rank that gives wrong choices keeps the number of tokens of the update before, and the other one has the new one.
TEST(ReplaceUsage, AfterAFailedUpdateAllRanksRefuseAlike) {
  run_ranks(2, [](int rank, moecclComm_t comm) {
    const moecclMoeConfig_t config = two_experts(64);
    moecclMoe_t moe = nullptr;
    moecclRouting_t routing = nullptr;
    moecclReplacement_t replacement = nullptr;
    moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
    replace.min_gain = -1;
    COMM_OK(moecclMoeCreate(&moe, comm, &config));
    COMM_OK(moecclReplaceCreate(&replacement, moe, &replace));
    const std::vector<int32_t> right(64, rank), wrong(64, 7);
    COMM_OK(moecclRoutingCreate(&routing, moe, right.data(), nullptr, 4));
    COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, nullptr));
    EXPECT_NE(moecclRoutingUpdate(routing, rank == 0 ? right.data() : wrong.data(), nullptr, 64), moecclSuccess);
    EXPECT_EQ(moecclReplaceBegin(replacement, routing, nullptr, nullptr), moecclInvalidUsage);
    EXPECT_NE(std::string(moecclGetLastError(comm)).find("the routing is empty"), std::string::npos)
        << moecclGetLastError(comm);
    COMM_OK(moecclRoutingUpdate(routing, right.data(), nullptr, 64));
    COMM_OK(moecclReplaceBegin(replacement, routing, nullptr, nullptr));
    size_t rows = 0;
    COMM_OK(moecclReplaceRows(replacement, &rows));
    COMM_OK(moecclRoutingDestroy(routing));
    EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  });
}

// The routing runs a plan that the replacement's layer, which is forced to one, does not have.
TEST(ReplaceUsage, ARoutingOfAnotherLayerIsRefused) {
  RankOptions options;
  options.config.topology = "node:2(bw=0.01GB/s,lat=5us) gpu:2(bw=100GB/s,lat=1us)";
  run_ranks(
      4,
      [](int, moecclComm_t comm) {
        constexpr size_t kTokens = 16;
        constexpr int32_t kTopK = 8;
        moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
        config.hidden_bytes = 4096;
        config.type = moecclFloat32;
        config.top_k = kTopK;
        config.n_experts = 16;
        config.max_tokens = kTokens;
        moecclMoe_t any = nullptr, flat = nullptr;
        COMM_OK(moecclMoeCreate(&any, comm, &config));
        config.algorithm = "flat";
        COMM_OK(moecclMoeCreate(&flat, comm, &config));
        moecclReplaceConfig_t replace = MOECCL_REPLACE_CONFIG_INIT;
        replace.use_next = 2;
        moecclReplacement_t replacement = nullptr;
        COMM_OK(moecclReplaceCreate(&replacement, flat, &replace));
        std::vector<int32_t> index(kTokens * kTopK);
        for (size_t i = 0; i < index.size(); ++i) index[i] = static_cast<int32_t>(2 * i % 16);
        moecclRouting_t routing = nullptr;
        COMM_OK(moecclRoutingCreate(&routing, any, index.data(), nullptr, kTokens));
        moecclRoutingInfo_t info{};
        info.size = sizeof(info);
        COMM_OK(moecclRoutingGetInfo(routing, &info));
        ASSERT_STRNE(info.algorithm, "flat");
        EXPECT_EQ(moecclReplaceBegin(replacement, routing, index.data(), nullptr), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("another layer"), std::string::npos);
        COMM_OK(moecclRoutingDestroy(routing));
        // The other layer's communicator may even have been destroyed, and another one have its memory. Only of an
        // empty routing is the communicator asked.
        moecclComm_t gone = nullptr, aborted = nullptr;
        moecclMoe_t on_gone = nullptr;
        COMM_OK(moecclCommSplit(comm, 0, 0, &gone, nullptr));
        COMM_OK(moecclMoeCreate(&on_gone, gone, &config));
        COMM_OK(moecclRoutingCreate(&routing, on_gone, index.data(), nullptr, kTokens));
        EXPECT_EQ(moecclRoutingUpdate(routing, index.data(), nullptr, kTokens + 1), moecclInvalidArgument);
        EXPECT_EQ(moecclCommDestroy(gone), moecclSuccess);
        COMM_OK(moecclCommSplit(comm, 0, 0, &aborted, nullptr));
        EXPECT_EQ(moecclCommAbort(aborted), moecclSuccess);
        EXPECT_EQ(moecclReplaceBegin(replacement, routing, index.data(), nullptr), moecclInvalidArgument);
        EXPECT_NE(std::string(moecclGetLastError(comm)).find("another layer"), std::string::npos);
        EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(on_gone), moecclSuccess);
        EXPECT_EQ(moecclCommDestroy(aborted), moecclSuccess);
        EXPECT_EQ(moecclReplaceDestroy(replacement), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(flat), moecclSuccess);
        EXPECT_EQ(moecclMoeDestroy(any), moecclSuccess);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
