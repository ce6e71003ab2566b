// SPDX-License-Identifier: Apache-2.0
// A layer whose experts swap: every expert has state by which it is known, and each step is compared with the
// definition.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <ostream>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

inline constexpr size_t kHidden = 8, kTokens = 96;

struct SwapShape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  const char* algorithm;
  int n_experts, top_k, layers, steps;
  int capacity = 0;
  moecclMoeLayout_t layout = moecclLayoutExpertMajor;
};
inline std::ostream& operator<<(std::ostream& out, const SwapShape& s) { return out << s.name; }

struct SwapRandom {
  uint64_t state;
  uint64_t below(uint64_t n) {
    uint64_t z = (state += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % n;
  }
};

// Experts with low numbers are chosen most, and these are adjacent.
inline std::vector<int32_t> choices(const SwapShape& s, int rank, int layer, int step) {
  SwapRandom random{static_cast<uint64_t>((rank * 64 + layer) * 1000 + step)};
  const auto experts = static_cast<uint64_t>(s.n_experts);
  std::vector<int32_t> topk;
  for (size_t t = 0; t < kTokens; ++t) {
    const size_t first = topk.size();
    while (topk.size() < first + static_cast<size_t>(s.top_k)) {
      const uint64_t r = random.below(experts * experts);
      const auto e = static_cast<int32_t>(r % experts < r / experts ? r % experts : r / experts);
      const bool known = std::find(topk.begin() + static_cast<ptrdiff_t>(first), topk.end(), e) != topk.end();
      topk.push_back(known ? -1 : e);
    }
  }
  return topk;
}

// Returns the weight that identifies an expert, a whole number.
inline float weight_of(int layer, int expert) { return static_cast<float>(1 + expert + 3 * layer); }

// A layer with three tensors: weights, a moment of another size, and gradients, which are written until Finish.
struct Swapping {
  Swapping(const SwapShape& s, moecclComm_t c, moecclExpertSwap_t swap, int number) : shape(s), comm(c), layer(number) {
    set_up(swap);
  }
  void set_up(moecclExpertSwap_t swap) {
    const SwapShape& s = shape;
    moecclMoeConfig_t config = MOECCL_MOE_CONFIG_INIT;
    config.hidden_bytes = kHidden * sizeof(float);
    config.type = moecclFloat32;
    config.top_k = s.top_k;
    config.n_experts = s.n_experts;
    config.max_tokens = kTokens;
    config.layout = s.layout;
    config.capacity = s.capacity;
    config.algorithm = s.algorithm;
    MOECCL_ASSERT_COMM_OK(moecclMoeCreate(&moe, comm, &config), comm);
    EXPECT_EQ(moecclCommUserRank(comm, &rank), moecclSuccess);
    const int share = s.n_experts / s.n, more = s.n_experts % s.n;
    const int first = rank * share + std::min(rank, more);
    for (int e = first; e < first + share + (rank < more ? 1 : 0); ++e) {
      weights.insert(weights.end(), kHidden, weight_of(layer, e));
      moments.insert(moments.end(), 3, 100.0 * layer + e);
      gradients.push_back(-1);
    }
    const moecclSwapTensor_t tensors[] = {{weights.data(), kHidden * sizeof(float), 0, 0},
                                          {moments.data(), 3 * sizeof(double), 0, 0},
                                          {gradients.data(), sizeof(float), 1, 0}};
    int32_t at = -1;
    MOECCL_ASSERT_COMM_OK(moecclExpertSwapAttach(swap, moe, tensors, 3, nullptr, &at), comm);
    EXPECT_EQ(at, layer);
  }
  ~Swapping() {
    EXPECT_EQ(moecclRoutingDestroy(routing), moecclSuccess);
    EXPECT_EQ(moecclMoeDestroy(moe), moecclSuccess);
  }

  // Runs one step's dispatch, experts and combine and compares with the definition, then writes the gradients.
  void run(int step) {
    const std::vector<int32_t> topk = choices(shape, rank, layer, step);
    if (routing == nullptr)
      MOECCL_ASSERT_COMM_OK(moecclRoutingCreate(&routing, moe, topk.data(), nullptr, kTokens), comm);
    else
      MOECCL_ASSERT_COMM_OK(moecclRoutingUpdate(routing, topk.data(), nullptr, kTokens), comm);
    moecclRoutingInfo_t info{};
    info.size = sizeof(info);
    MOECCL_ASSERT_COMM_OK(moecclRoutingGetInfo(routing, &info), comm);
    std::vector<float> x(kTokens * kHidden), rows(info.n_rows * kHidden + 1), y(rows.size()), out(x.size());
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(rank + 1) + static_cast<float>(i % 13);
    MOECCL_ASSERT_COMM_OK(moecclDispatch(routing, x.data(), rows.data(), nullptr), comm);
    ASSERT_EQ(static_cast<size_t>(info.n_local_experts), gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) {
      const int32_t e = info.local_experts[i];
      ASSERT_EQ(weights[i * kHidden + 3], weight_of(layer, e)) << "slot " << i << " of layer " << layer;
      ASSERT_EQ(moments[i * 3 + 2], 100.0 * layer + e);
      if (step > 0) {
        ASSERT_EQ(gradients[i], static_cast<float>(e + 7 * (step - 1)));
      }
      gradients[i] = static_cast<float>(e + 7 * step);
    }
    compute(info, rows, y);
    MOECCL_ASSERT_COMM_OK(moecclCombine(routing, y.data(), out.data(), nullptr), comm);
    check(topk, x, out, info);
  }

  void compute(const moecclRoutingInfo_t& info, const std::vector<float>& rows, std::vector<float>& y) const {
    for (size_t r = 0; r < info.n_rows; ++r) {
      float factor = 0;
      if (info.expert_offsets != nullptr) {
        size_t i = 0;
        while (static_cast<size_t>(info.expert_offsets[i + 1]) <= r) ++i;
        factor = weights[i * kHidden];
      } else {
        for (int64_t c = info.choice_offsets[r]; c < info.choice_offsets[r + 1]; ++c)
          factor += weights[static_cast<size_t>(info.choice_expert[c]) * kHidden];
      }
      for (size_t h = 0; h < kHidden; ++h) y[r * kHidden + h] = factor * rows[r * kHidden + h];
    }
  }

  void check(const std::vector<int32_t>& topk, const std::vector<float>& x, const std::vector<float>& out,
             const moecclRoutingInfo_t& info) const {
    std::vector<int32_t> chosen(static_cast<size_t>(shape.n_experts));
    for (size_t t = 0; t < kTokens; ++t) {
      float factor = 0;
      for (size_t k = 0; k < static_cast<size_t>(shape.top_k); ++k) {
        const int32_t e = topk[t * static_cast<size_t>(shape.top_k) + k];
        if (e < 0) continue;
        if (shape.capacity == 0 || chosen[static_cast<size_t>(e)]++ < shape.capacity) factor += weight_of(layer, e);
      }
      for (size_t h = 0; h < kHidden; ++h)
        ASSERT_EQ(out[t * kHidden + h], factor * x[t * kHidden + h]) << "token " << t;
    }
    for (size_t e = 0; e < chosen.size(); ++e)
      ASSERT_EQ(info.drop_counts[e], shape.capacity == 0 ? 0 : std::max(0, chosen[e] - shape.capacity))
          << "expert " << e;
  }

  const SwapShape& shape;
  moecclComm_t comm;
  int layer, rank = 0;
  moecclMoe_t moe = nullptr;
  moecclRouting_t routing = nullptr;
  std::vector<float> weights, gradients;
  std::vector<double> moments;
};

// Any swap pays.
inline moecclExpertSwapConfig_t eager() {
  moecclExpertSwapConfig_t config = MOECCL_EXPERT_SWAP_CONFIG_INIT;
  config.interval = 1;
  config.min_gain = -1;
  config.horizon = 1e9;
  return config;
}

}  // namespace moeccl::testing
