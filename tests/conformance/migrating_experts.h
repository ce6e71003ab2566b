// SPDX-License-Identifier: Apache-2.0
// Experts that migrate from a rank, and the comparison of what arrives with what was sent.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>
#include <thread>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

struct MigrationShape {
  const char* name;
  int n;
  RankMode mode;
  const char* topology;
  std::vector<int32_t> domain;
  int n_experts, layers, steps;
  size_t count;
  double ratio;
  bool pace = false;
};
inline std::ostream& operator<<(std::ostream& out, const MigrationShape& s) { return out << s.name; }

// Experts have much in common, as real ones do: a slow wave, and a few elements that differ.
inline float element_of(int expert, int layer, int step, size_t i) {
  const auto x = static_cast<float>(i % 61) * 0.125f + static_cast<float>(layer);
  const bool own = (i * 7 + static_cast<size_t>(expert) * 13 + static_cast<size_t>(step)) % 97 == 0;
  return x +
         (own ? static_cast<float>(expert + 1) + static_cast<float>(step) * 0.5f : 0.001f * static_cast<float>(expert));
}
inline std::vector<float> expert_of(const MigrationShape& s, int expert, int layer, int step) {
  std::vector<float> e;
  for (size_t i = 0; i < s.count; ++i) e.push_back(element_of(expert, layer, step, i));
  return e;
}

struct Moving {
  Moving(const MigrationShape& s, moecclComm_t c) : shape(s), comm(c) {
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = s.n_experts;
    config.n_levels = static_cast<int32_t>(s.domain.size());
    config.domain = s.domain.data();
    EXPECT_EQ(moecclHybridCreate(&hybrid, comm, &config), moecclSuccess) << moecclGetLastError(comm);
    info.size = sizeof(info);
    EXPECT_EQ(moecclHybridGetInfo(hybrid, &info), moecclSuccess);
    moecclMigrationConfig_t migrate = MOECCL_MIGRATION_CONFIG_INIT;
    migrate.count = s.count;
    migrate.ratio = s.ratio;
    migrate.n_layers = s.layers;
    EXPECT_EQ(moecclMigrationCreate(&migration, hybrid, nullptr, &migrate), moecclSuccess) << moecclGetLastError(comm);
  }
  ~Moving() {
    EXPECT_EQ(moecclMigrationDestroy(migration), moecclSuccess);
    EXPECT_EQ(moecclHybridDestroy(hybrid), moecclSuccess);
  }
  std::vector<float> own(int layer, int step) const {
    std::vector<float> all;
    for (int32_t e = 0; e < info.n_own; ++e) {
      const std::vector<float> one = expert_of(shape, info.own_experts[e], layer, step);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }
  const MigrationShape& shape;
  moecclComm_t comm;
  moecclHybrid_t hybrid = nullptr;
  moecclHybridInfo_t info{};
  moecclMigration_t migration = nullptr;
};

inline uint64_t sent_bytes(const MigrationShape& shape, moecclComm_t comm) {
  std::vector<moecclTraffic_t> to(static_cast<size_t>(shape.n));
  EXPECT_EQ(moecclCommTraffic(comm, to.data(), shape.n), moecclSuccess);
  uint64_t sum = 0;
  for (const moecclTraffic_t& t : to) sum += t.bytes;
  return sum;
}

inline void check_arrivals(const Moving& s, int layer, int step, const std::vector<float>& shared,
                           const std::vector<float>& held) {
  const MigrationShape& shape = s.shape;
  if (shape.count == 0) return;  // experts without elements arrive without bytes
  moecclCodec_t codec = MOECCL_CODEC_INIT;
  codec.count = shape.count;
  codec.ratio = shape.ratio;
  size_t bytes = 0;
  ASSERT_EQ(moecclCodecBytes(&codec, &bytes), moecclSuccess);
  std::vector<unsigned char> encoded(bytes);
  for (int32_t h = 0; h < s.info.n_held; ++h) {
    std::vector<float> want = expert_of(shape, s.info.held_experts[h], layer, step), plain = want;
    if (shape.ratio > 1) {
      ASSERT_EQ(moecclCodecEncode(&codec, plain.data(), shared.data(), encoded.data(), bytes, nullptr), moecclSuccess);
      ASSERT_EQ(moecclCodecDecode(&codec, encoded.data(), bytes, shared.data(), want.data()), moecclSuccess);
    }
    EXPECT_TRUE(shape.count == 0 || std::memcmp(want.data(), held.data() + static_cast<size_t>(h) * shape.count,
                                                shape.count * sizeof(float)) == 0)
        << "expert " << s.info.held_experts[h] << ", layer " << layer << ", step " << step;
  }
}

// The optimizer's step, which turns zeros into the experts' new values.
struct OptimizerStep {
  std::vector<float> experts, values;
  size_t count = 0, stop_at = SIZE_MAX;
  static int update(void* context, int expert, size_t first, size_t n) {
    auto& self = *static_cast<OptimizerStep*>(context);
    if (self.stop_at-- == 0) return 5;
    const size_t at = static_cast<size_t>(expert) * self.count + first;
    std::copy_n(&self.values[at], n, &self.experts[at]);
    return 0;
  }
};
// The experts' computation, which only records the weights here.
inline int write_down(void* context, size_t first, size_t n, const void* values) {
  std::memcpy(static_cast<float*>(context) + first, values, n * sizeof(float));
  return 0;
}
// Uses every held expert from several threads, the second half of each before the first.
inline void use_all(const Moving& s, int layer, std::vector<float>& held) {
  std::vector<std::thread> threads;
  for (int32_t h = 0; h < s.info.n_held; ++h)
    threads.emplace_back([&, h] {
      moecclExpertUse_t use = MOECCL_EXPERT_USE_INIT;
      use.use = write_down;
      use.context = &held[static_cast<size_t>(h) * s.shape.count];
      use.first = s.shape.count / 2;
      EXPECT_EQ(moecclMigrationUseExpert(s.migration, layer, h, &use), moecclSuccess) << moecclGetLastError(s.comm);
      use.count = use.first;
      use.first = 0;
      if (use.count > 0) {
        EXPECT_EQ(moecclMigrationUseExpert(s.migration, layer, h, &use), moecclSuccess) << moecclGetLastError(s.comm);
      }
    });
  for (std::thread& t : threads) t.join();
}

}  // namespace moeccl::testing
