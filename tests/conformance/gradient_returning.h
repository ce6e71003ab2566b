// SPDX-License-Identifier: Apache-2.0
// A rank whose gradients return compressed, and a naive reference of what the codec keeps and what remains.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <ostream>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {

struct GradientShape {
  std::string name;
  int n;
  RankMode mode;
  std::string topology;  // "": one level
  std::vector<int32_t> domain;
  std::vector<int32_t> owner;  // of each expert
  size_t count;
  double ratio;
  moecclDataType_t type = moecclFloat32;
  int layers = 1;
  bool integers = false;  // sums are then exact
  bool pace = false;
};
inline std::ostream& operator<<(std::ostream& out, const GradientShape& s) {
  out << s.name << ": " << s.n << " ranks, " << s.mode << ", '" << s.topology << "', domain";
  for (const int32_t d : s.domain) out << ' ' << d;
  out << ", owners";
  for (const int32_t o : s.owner) out << ' ' << o;
  return out << ", count " << s.count << ", ratio " << s.ratio << (s.type == moecclBfloat16 ? ", bf16" : ", fp32");
}

// Gradients as floats with values of the type, and their bytes.
using Values = std::vector<float>;
inline float rounded(float v, moecclDataType_t type) {
  if (type == moecclFloat32) return v;
  const auto bits = std::bit_cast<uint32_t>(v);
  return std::bit_cast<float>((bits + 0x7fffu + ((bits >> 16) & 1)) & 0xffff0000u);
}
inline std::vector<unsigned char> bytes_of(const Values& values, moecclDataType_t type) {
  const size_t each = moecclTypeSize(type);
  std::vector<unsigned char> bytes(values.size() * each);
  for (size_t i = 0; i < values.size(); ++i)
    std::memcpy(&bytes[i * each], reinterpret_cast<const unsigned char*>(&values[i]) + (sizeof(float) - each), each);
  return bytes;
}
inline Values values_of(const std::vector<unsigned char>& bytes, moecclDataType_t type) {
  const size_t each = moecclTypeSize(type);
  Values values(bytes.size() / each, 0.0f);
  for (size_t i = 0; i < values.size(); ++i)
    std::memcpy(reinterpret_cast<unsigned char*>(&values[i]) + (sizeof(float) - each), &bytes[i * each], each);
  return values;
}

inline Values gradient_of(const GradientShape& s, int rank, int expert, int layer, int step) {
  std::mt19937 random(static_cast<unsigned>(((rank * 131 + expert) * 17 + layer) * 7 + step));
  Values g(s.count);
  for (float& v : g) {
    const auto x = static_cast<uint32_t>(random());
    v = s.integers
            ? static_cast<float>(static_cast<int>(x % 7) - 3)
            : rounded(std::ldexp(static_cast<float>(static_cast<int>(x % 2001) - 1000), -static_cast<int>(x >> 29)),
                      s.type);
  }
  return g;
}

// What rank `rank` keeps and sends, by the definition in gradient.h.
class GradientReference {
 public:
  explicit GradientReference(const GradientShape& shape) : shape_(shape) {}
  // Returns the decoded gradient and updates the remainder.
  Values send(int rank, int expert, int layer, int step) {
    if (shape_.count == 0) return {};
    Values& r = remainder(rank, expert, layer);
    const Values g = gradient_of(shape_, rank, expert, layer, step);
    Values sum(g.size()), kept;
    for (size_t i = 0; i < g.size(); ++i) sum[i] = rounded(g[i] + r[i], shape_.type);
    moecclCodec_t codec = MOECCL_CODEC_INIT;
    codec.count = shape_.count, codec.type = shape_.type, codec.ratio = shape_.ratio;
    size_t bytes = 0;
    EXPECT_EQ(moecclCodecBytes(&codec, &bytes), moecclSuccess);
    const std::vector<unsigned char> typed = bytes_of(sum, shape_.type), zeros(typed.size());
    std::vector<unsigned char> encoded(bytes), decoded(typed.size());
    EXPECT_EQ(moecclCodecEncode(&codec, typed.data(), zeros.data(), encoded.data(), bytes, nullptr), moecclSuccess);
    EXPECT_EQ(moecclCodecDecode(&codec, encoded.data(), bytes, zeros.data(), decoded.data()), moecclSuccess);
    kept = values_of(decoded, shape_.type);
    for (size_t i = 0; i < g.size(); ++i) r[i] = g[i] + r[i] - kept[i];
    return kept;
  }
  Values& remainder(int rank, int expert, int layer) {
    Values& r = remainders_[{rank, {expert, layer}}];
    r.resize(shape_.count);
    return r;
  }

 private:
  const GradientShape& shape_;
  std::map<std::pair<int, std::pair<int, int>>, Values> remainders_;
};

class Returning {
 public:
  Returning(const GradientShape& s, int rank, moecclComm_t comm) : shape_(s), rank_(rank), reference_(s) {
    create(comm);
  }
  void create(moecclComm_t comm) {
    const GradientShape& s = shape_;
    moecclHybridConfig_t config = MOECCL_HYBRID_CONFIG_INIT;
    config.n_experts = static_cast<int32_t>(s.owner.size());
    config.expert_rank = s.owner.data();
    config.n_levels = static_cast<int32_t>(s.domain.size());
    config.domain = s.domain.data();
    MOECCL_ASSERT_COMM_OK(moecclHybridCreate(&hybrid, comm, &config), comm);
    info.size = sizeof(info);
    MOECCL_ASSERT_OK(moecclHybridGetInfo(hybrid, &info));
    holds_.resize(static_cast<size_t>(s.n) * s.owner.size());
    std::vector<int8_t> mine(s.owner.size());
    for (int32_t h = 0; h < info.n_held; ++h) mine[static_cast<size_t>(info.held_experts[h])] = 1;
    MOECCL_ASSERT_COMM_OK(moecclAllGather(mine.data(), holds_.data(), mine.size(), moecclInt8, comm, nullptr), comm);
    moecclGradientReturnConfig_t back = MOECCL_GRADIENT_RETURN_CONFIG_INIT;
    back.count = s.count, back.type = s.type, back.ratio = s.ratio, back.n_layers = s.layers;
    MOECCL_ASSERT_COMM_OK(moecclGradientReturnCreate(&gradients, hybrid, nullptr, &back), comm);
    for (int l = 0; l < s.layers; ++l)
      for (int32_t e = 0; e < info.n_own; ++e) returned_.emplace_back(s.count), computed_.emplace_back(s.count);
  }
  ~Returning() {
    EXPECT_EQ(moecclGradientReturnDestroy(gradients), moecclSuccess);
    EXPECT_EQ(moecclHybridDestroy(hybrid), moecclSuccess);
  }
  std::vector<unsigned char> held(int layer, int step) const {
    Values all;
    for (int32_t h = 0; h < info.n_held; ++h) {
      const Values g = gradient_of(shape_, rank_, info.held_experts[h], layer, step);
      all.insert(all.end(), g.begin(), g.end());
    }
    return bytes_of(all, shape_.type);
  }
  size_t own_bytes() const { return static_cast<size_t>(info.n_own) * shape_.count * moecclTypeSize(shape_.type); }
  moecclGradientReturnInfo_t facts(int layer) const {
    moecclGradientReturnInfo_t f{};
    f.size = sizeof(f);
    EXPECT_EQ(moecclGradientReturnGetInfo(gradients, layer, &f), moecclSuccess);
    return f;
  }
  // Compares what a Reduce has written with the reference, which takes the same step.
  void check(int layer, int step, const std::vector<unsigned char>& own) {
    Values want;
    for (int32_t e = 0; e < info.n_own; ++e) {
      const int expert = info.own_experts[e];
      Values sum = gradient_of(shape_, rank_, expert, layer, step), all = sum;
      for (int r = 0; r < shape_.n; ++r) {
        if (r == rank_ || holds_[static_cast<size_t>(r) * shape_.owner.size() + static_cast<size_t>(expert)] == 0)
          continue;
        const Values kept = reference_.send(r, expert, layer, step), g = gradient_of(shape_, r, expert, layer, step);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] = rounded(sum[i] + kept[i], shape_.type), all[i] += g[i];
      }
      const auto at = static_cast<size_t>(layer * info.n_own + e);
      for (size_t i = 0; i < sum.size(); ++i) returned_[at][i] += sum[i], computed_[at][i] += all[i];
      want.insert(want.end(), sum.begin(), sum.end());
    }
    EXPECT_EQ(own, bytes_of(want, shape_.type)) << "layer " << layer << ", step " << step;
    const moecclGradientReturnInfo_t f = facts(layer);
    ASSERT_EQ(f.n_remainders, info.n_held - info.n_own);
    const float* at = f.remainders;
    for (int32_t h = 0; h < info.n_held; ++h) {
      const int expert = info.held_experts[h];
      if (shape_.owner[static_cast<size_t>(expert)] == rank_) continue;
      reference_.send(rank_, expert, layer, step);
      const Values& r = reference_.remainder(rank_, expert, layer);
      EXPECT_TRUE(shape_.count == 0 || std::memcmp(r.data(), at, shape_.count * sizeof(float)) == 0)
          << "remainder of expert " << expert << ", layer " << layer << ", step " << step;
      at += shape_.count;
    }
  }
  // Everything that has come back and everything that is kept is everything that was computed.
  void check_sums(int layer) {
    for (int32_t e = 0; e < info.n_own; ++e) {
      const auto at = static_cast<size_t>(layer * info.n_own + e);
      Values sum = returned_[at];
      for (int r = 0; r < shape_.n; ++r) {
        const Values& left = reference_.remainder(r, info.own_experts[e], layer);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += left[i];
      }
      EXPECT_EQ(sum, computed_[at]) << "expert " << info.own_experts[e];
    }
  }

  moecclHybrid_t hybrid = nullptr;
  moecclHybridInfo_t info{};
  moecclGradientReturn_t gradients = nullptr;

 private:
  const GradientShape& shape_;
  int rank_;
  GradientReference reference_;
  std::vector<int8_t> holds_;                // [rank][expert]
  std::vector<Values> returned_, computed_;  // [layer][own expert]: sums over the steps
};

}  // namespace moeccl::testing
