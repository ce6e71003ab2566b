// SPDX-License-Identifier: Apache-2.0
// Random inputs for the solvers' tests.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "moeccl/moeccl.h"
#include "src/base/random.h"

namespace moeccl::solve::testing {

inline uint64_t seed() {
  const char* text = std::getenv("MOECCL_TEST_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

// Costs of n_items for n_bins, of one of four kinds: uniform, few values (ties), one bin much cheaper, favourites.
struct Costs {
  int32_t n_items = 0, n_bins = 0;
  std::vector<int32_t> cost, capacity;
};
inline Costs random_costs(SplitMix64& random, int32_t n_items, int32_t n_bins, bool even) {
  Costs c{n_items, n_bins, {}, {}};
  const uint64_t manner = random.below(4);
  for (int32_t i = 0; i < n_items; ++i) {
    const auto favourite = static_cast<int32_t>(random.below(static_cast<uint64_t>(n_bins)));
    for (int32_t b = 0; b < n_bins; ++b) {
      auto value = static_cast<int32_t>(random.below(manner == 1 ? 4 : 2000));
      if (manner == 2) value += b * 700;
      if (manner == 3 && b != favourite) value += 1500;
      c.cost.push_back(value);
    }
  }
  c.capacity.assign(static_cast<size_t>(n_bins), even ? n_items / n_bins : 0);
  for (int32_t left = even ? n_items % n_bins : n_items; left > 0; --left)
    ++c.capacity[random.below(static_cast<uint64_t>(n_bins))];
  return c;
}

// NetMoE's locality: `share` of each sample's tokens go to the experts of one device, which is drawn per sample, and
// the rest to all experts alike. num[I][E].
struct Locality {
  int32_t n_samples, n_experts, n_devices, tokens;
  double share;
};
inline std::vector<int32_t> local_routing(SplitMix64& random, const Locality& l) {
  std::vector<int32_t> num(static_cast<size_t>(l.n_samples) * static_cast<size_t>(l.n_experts));
  const auto experts = static_cast<uint64_t>(l.n_experts), devices = static_cast<uint64_t>(l.n_devices);
  for (size_t i = 0; i < static_cast<size_t>(l.n_samples); ++i) {
    const uint64_t topic = random.below(devices);
    for (int32_t t = 0; t < l.tokens; ++t) {
      const uint64_t e =
          random.unit() < l.share ? (topic * experts + random.below(experts)) / devices : random.below(experts);
      ++num[i * experts + e];
    }
  }
  return num;
}

inline std::vector<int32_t> random_topk(SplitMix64& random, int64_t n_tokens, int32_t k, int32_t n_experts) {
  std::vector<int32_t> topk(static_cast<size_t>(n_tokens * k));
  for (int64_t t = 0; t < n_tokens; ++t) {
    for (int32_t j = 0; j < k;) {
      const auto e = static_cast<int32_t>(random.below(static_cast<uint64_t>(n_experts)));
      int32_t* chosen = &topk[static_cast<size_t>(t * k)];
      bool again = false;
      for (int32_t h = 0; h < j; ++h) again |= chosen[h] == e;
      if (!again) chosen[j++] = e;
    }
  }
  return topk;
}

}  // namespace moeccl::solve::testing
