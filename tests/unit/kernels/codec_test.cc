// SPDX-License-Identifier: Apache-2.0
#include "kernels/codec.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/float_formats.h"
#include "kernels/table.h"

namespace moeccl::kernels {
namespace {

struct Tensor {
  std::vector<std::byte> bytes;
  const void* data() const { return bytes.data(); }
};

float element(const Tensor& t, moecclDataType_t type, size_t i) {
  if (type == moecclFloat32) {
    float f;
    std::memcpy(&f, t.bytes.data() + 4 * i, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, t.bytes.data() + 2 * i, 2);
  return Bf16::decode(h);
}

Tensor tensor(const std::vector<float>& values, moecclDataType_t type) {
  Tensor t;
  t.bytes.resize(values.size() * (type == moecclFloat32 ? 4 : 2));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto half = static_cast<uint16_t>(Bf16::encode(values[i]));
    if (type == moecclFloat32)
      std::memcpy(t.bytes.data() + 4 * i, &values[i], 4);
    else
      std::memcpy(t.bytes.data() + 2 * i, &half, 2);
  }
  return t;
}

// Draws residuals like those of experts, of which most are small and some are not. `kind` selects awkward ones.
std::vector<float> draw(std::mt19937& random, size_t n, int kind) {
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) {
    x = normal(random);
    if (kind == 1) x = static_cast<float>(static_cast<int>(random() % 3) - 1);  // ties everywhere
    if (kind == 2) x = 0.25f;                                                   // all equal
    if (kind == 3 && random() % 50 == 0) x *= 1e4f;                             // outliers
    if (kind == 4 && random() % 1000 == 0) x = INFINITY;
    if (kind == 5) x = random() % 100 == 0 ? normal(random) : 0;  // sparse
  }
  return v;
}

struct Case {
  moecclDataType_t type;
  size_t count;
  double ratio;
  int kind;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const moecclDataType_t type : {moecclFloat32, moecclBfloat16})
    for (const size_t count : {0, 1, 31, 1000, 65536, 65537, 70'001})
      for (const double ratio : {1.0, 1.5, 10.0, 50.0})
        for (int kind = 0; kind < 6; ++kind) all.push_back({type, count, ratio, kind});
  return all;
}

TEST(Codec, EveryTableWritesTheSameBytes) {
  std::mt19937 random(1);
  for (const Case& c : cases()) {
    const Tensor expert = tensor(draw(random, c.count, c.kind), c.type);
    const Tensor shared = tensor(draw(random, c.count, c.kind == 2 ? 2 : 5), c.type);
    const CodecShape shape{c.type, c.count, c.ratio};
    std::vector<std::byte> expected(codec_bytes(shape));
    const CodecError error =
        codec_encode(*select_codec("reference"), shape, expert.data(), shared.data(), expected.data());
    for (const char* name : names()) {
      const CodecTable* table = select_codec(name);
      if (table == nullptr) continue;
      std::vector<std::byte> encoded(expected.size(), std::byte{0xee});
      const CodecError other = codec_encode(*table, shape, expert.data(), shared.data(), encoded.data());
      ASSERT_EQ(encoded, expected) << name << " type " << c.type << " count " << c.count << " ratio " << c.ratio
                                   << " kind " << c.kind;
      if (!std::isnan(error.relative)) {
        EXPECT_EQ(other.relative, error.relative) << name << " kind " << c.kind;
      }
      EXPECT_EQ(other.max_dropped, error.max_dropped) << name;
    }
  }
}

// Sorts all residuals of a block: the kept ones must be the largest, and decoding must add exactly those.
TEST(Codec, KeepsTheLargestResidualsOfEachBlock) {
  std::mt19937 random(2);
  for (const Case& c : cases()) {
    if (c.kind == 4 || c.ratio == 1) continue;
    const Tensor expert = tensor(draw(random, c.count, c.kind), c.type),
                 shared = tensor(draw(random, c.count, 5), c.type);
    const CodecShape shape{c.type, c.count, c.ratio};
    std::vector<std::byte> encoded(codec_bytes(shape));
    const CodecError error = codec_encode(best_codec(), shape, expert.data(), shared.data(), encoded.data());
    Tensor decoded;
    decoded.bytes.resize(expert.bytes.size());
    ASSERT_TRUE(codec_decode(shape, encoded.data(), encoded.size(), shared.data(), decoded.bytes.data()));
    double lost = 0, whole = 0, max_dropped = 0;
    size_t n_kept = 0;
    for (size_t first = 0; first < c.count; first += kCodecBlock) {
      const size_t n = std::min<size_t>(kCodecBlock, c.count - first);
      std::vector<size_t> order(n);
      for (size_t i = 0; i < n; ++i) order[i] = i;
      const auto residual = [&](size_t i) {
        return element(expert, c.type, first + i) - element(shared, c.type, first + i);
      };
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return std::fabs(residual(a)) > std::fabs(residual(b)); });
      const double element_bytes = c.type == moecclFloat32 ? 4 : 2;
      const auto k = std::max<size_t>(
          1, static_cast<size_t>(static_cast<double>(n) * element_bytes / (c.ratio * (element_bytes + 2))));
      n_kept += k;
      for (size_t i = 0; i < n; ++i) {
        const size_t at = first + order[i];
        const float s = element(shared, c.type, at), d = element(decoded, c.type, at), e = element(expert, c.type, at);
        if (i >= k) {
          ASSERT_EQ(d, s) << "element " << at << " was dropped";
          max_dropped = std::max(max_dropped, static_cast<double>(std::fabs(residual(order[i]))));
        } else {
          const std::vector<float> rounded = {residual(order[i])};
          const Tensor r = tensor(rounded, c.type), sum = tensor({s + element(r, c.type, 0)}, c.type);
          ASSERT_EQ(d, element(sum, c.type, 0)) << "element " << at;
        }
        lost += (static_cast<double>(e) - d) * (static_cast<double>(e) - d);
        whole += static_cast<double>(e) * e;
      }
    }
    EXPECT_EQ(encoded.size(), 32 + n_kept * (c.type == moecclFloat32 ? 6 : 4));
    EXPECT_EQ(error.max_dropped, max_dropped);
    if (whole > 0) {
      EXPECT_NEAR(error.relative, std::sqrt(lost / whole), 1e-3);
    }
  }
}

TEST(Codec, AnExpertWithNaNHasNoNumberForItsError) {
  std::mt19937 random(4);
  for (const moecclDataType_t type : {moecclFloat32, moecclBfloat16})
    for (const size_t apart : {size_t{7}, size_t{70'000}}) {  // more than are kept, and one, which is kept
      std::vector<float> values = draw(random, 70'001, 0);
      const Tensor shared = tensor(values, type);
      for (size_t i = 3; i < values.size(); i += apart) values[i] = NAN;
      const Tensor expert = tensor(values, type);
      const CodecShape shape{type, values.size(), 50};
      std::vector<std::byte> expected;
      for (const char* name : names()) {
        if (select_codec(name) == nullptr) continue;
        std::vector<std::byte> encoded(codec_bytes(shape));
        const CodecError error = codec_encode(*select_codec(name), shape, expert.data(), shared.data(), encoded.data());
        EXPECT_TRUE(std::isnan(error.relative)) << name << " says " << error.relative;
        EXPECT_EQ(std::isnan(error.max_dropped), apart == 7) << name << " says " << error.max_dropped;
        if (expected.empty()) expected = encoded;
        EXPECT_EQ(encoded, expected) << name;
      }
    }
}

TEST(Codec, RatioOneIsExact) {
  std::mt19937 random(3);
  for (const moecclDataType_t type : {moecclFloat32, moecclBfloat16}) {
    const Tensor expert = tensor(draw(random, 70'001, 3), type);
    const CodecShape shape{type, 70'001, 1};
    std::vector<std::byte> encoded(codec_bytes(shape)), out(expert.bytes.size());
    const CodecError error = codec_encode(best_codec(), shape, expert.data(), nullptr, encoded.data());
    ASSERT_TRUE(codec_decode(shape, encoded.data(), encoded.size(), nullptr, out.data()));
    EXPECT_EQ(out, expert.bytes);
    EXPECT_EQ(error.relative, 0);
    EXPECT_EQ(encoded.size(), expert.bytes.size() + 32);
  }
}

TEST(Codec, ForeignBytesAreRefused) {
  std::mt19937 random(4);
  const CodecShape shape{moecclFloat32, 1000, 10};
  const Tensor expert = tensor(draw(random, 1000, 0), moecclFloat32),
               shared = tensor(draw(random, 1000, 5), moecclFloat32);
  std::vector<std::byte> good(codec_bytes(shape)), out(4000);
  codec_encode(best_codec(), shape, expert.data(), shared.data(), good.data());
  const auto decodes = [&](const std::vector<std::byte>& bytes, const CodecShape& as) {
    return codec_decode(as, bytes.data(), bytes.size(), shared.data(), out.data());
  };
  EXPECT_TRUE(decodes(good, shape));
  std::vector<std::byte> bad = good;
  bad.pop_back();
  EXPECT_FALSE(decodes(bad, shape));
  bad = good;
  bad[0] ^= std::byte{1};
  EXPECT_FALSE(decodes(bad, shape));
  bad = good;
  bad[bad.size() - 1] = std::byte{0xff};  // an index beyond the block
  EXPECT_FALSE(decodes(bad, shape));
  EXPECT_FALSE(codec_valid(shape, bad.data(), bad.size()));
  // Indices that do not ascend, or occur twice.
  std::byte* const last = good.data() + good.size() - sizeof(uint16_t);
  for (const bool twice : {false, true}) {
    bad = good;
    std::byte* const before = bad.data() + bad.size() - 2 * sizeof(uint16_t);
    if (twice)
      std::copy_n(last, sizeof(uint16_t), before);
    else
      std::swap_ranges(before, before + sizeof(uint16_t), before + sizeof(uint16_t));
    EXPECT_FALSE(decodes(bad, shape)) << "twice " << twice;
    EXPECT_FALSE(codec_valid(shape, bad.data(), bad.size())) << "twice " << twice;
  }
  EXPECT_TRUE(codec_valid(shape, good.data(), good.size()));
  EXPECT_FALSE(decodes(good, {moecclFloat32, 1000, 10.001}));
  EXPECT_FALSE(decodes(good, {moecclBfloat16, 1000, 10}));
}

// An update brings experts to their values block by block. The bytes must equal those of experts that already have
// these values.
TEST(Codec, EncodingBehindUpdatesGivesTheSameBytes) {
  std::mt19937 random(5);
  for (const Case& c : cases()) {
    const CodecShape shape{c.type, c.count, c.ratio};
    constexpr uint32_t kExperts = 3;
    const size_t element_bytes = c.type == moecclFloat32 ? 4 : 2, whole = c.count * element_bytes;
    const Tensor shared = tensor(draw(random, c.count, 5), c.type);
    std::vector<std::byte> experts(kExperts * whole), values(experts.size()), expected(kExperts * codec_bytes(shape)),
        encoded(expected.size(), std::byte{0xee});
    CodecError errors[kExperts], alone[kExperts];
    for (uint32_t e = 0; e < kExperts; ++e) {
      const Tensor t = tensor(draw(random, c.count, (c.kind + static_cast<int>(e)) % 6), c.type);
      std::copy(t.bytes.begin(), t.bytes.end(), values.begin() + static_cast<ptrdiff_t>(e * whole));
      alone[e] = codec_encode(best_codec(), shape, t.data(), shared.data(), expected.data() + e * codec_bytes(shape));
    }
    std::vector<uint64_t> done(kExperts);
    const auto update = [&](uint32_t e, uint64_t first, uint64_t n) {
      EXPECT_EQ(first, done[e]) << "expert " << e;
      done[e] += n;
      const size_t at = e * whole + first * element_bytes;
      std::memcpy(experts.data() + at, values.data() + at, n * element_bytes);
      return true;
    };
    ASSERT_TRUE(
        codec_encode(best_codec(), shape, {experts.data(), shared.data(), encoded.data(), errors, kExperts}, update));
    EXPECT_EQ(done, std::vector<uint64_t>(kExperts, c.count));
    ASSERT_EQ(encoded, expected) << "type " << c.type << " count " << c.count << " ratio " << c.ratio << " kind "
                                 << c.kind;
    for (uint32_t e = 0; e < kExperts; ++e) {
      EXPECT_EQ(errors[e].max_dropped, alone[e].max_dropped);
      if (!std::isnan(alone[e].relative)) {
        EXPECT_EQ(errors[e].relative, alone[e].relative);
      }
    }
  }
}

TEST(Codec, PiecesOfAnyRangeHaveTheDecodedValues) {
  std::mt19937 random(6);
  for (const Case& c : cases()) {
    if (c.kind == 4) continue;
    const CodecShape shape{c.type, c.count, c.ratio};
    const size_t element_bytes = c.type == moecclFloat32 ? 4 : 2;
    const Tensor expert = tensor(draw(random, c.count, c.kind), c.type),
                 shared = tensor(draw(random, c.count, 5), c.type);
    std::vector<std::byte> encoded(codec_bytes(shape)), whole(expert.bytes.size());
    codec_encode(best_codec(), shape, expert.data(), shared.data(), encoded.data());
    ASSERT_TRUE(codec_decode(shape, encoded.data(), encoded.size(), shared.data(), whole.data()));
    for (int trial = 0; trial < 6; ++trial) {
      CodecRange range;
      range.row = trial < 2 ? 1 : 1 + random() % (trial < 5 ? 1500 : 40'000);
      range.first = trial == 0 ? 0 : random() % (c.count + 1);
      range.count = trial == 0 ? c.count : (c.count - range.first) / range.row * range.row;
      uint64_t next = range.first;
      ASSERT_TRUE(
          codec_decode(shape, encoded.data(), encoded.size(), shared.data(), range,
                       [&](uint64_t first, uint64_t n, const void* values) {
                         EXPECT_EQ(first, next);
                         EXPECT_EQ(n % range.row, 0u);
                         EXPECT_TRUE(n <= kCodecPiece || n == range.row) << n;
                         EXPECT_EQ(std::memcmp(values, whole.data() + first * element_bytes, n * element_bytes), 0)
                             << "count " << c.count << " ratio " << c.ratio << " first " << first;
                         next = first + n;
                         return true;
                       }));
      EXPECT_EQ(next, range.first + range.count);
      if (::testing::Test::HasFailure()) return;
    }
  }
}

TEST(Codec, PiecesOfForeignBytesAreRefusedBeforeTheFirst) {
  std::mt19937 random(7);
  const CodecShape shape{moecclFloat32, 70'000, 10};
  const Tensor expert = tensor(draw(random, 70'000, 0), moecclFloat32),
               shared = tensor(draw(random, 70'000, 5), moecclFloat32);
  std::vector<std::byte> bytes(codec_bytes(shape));
  codec_encode(best_codec(), shape, expert.data(), shared.data(), bytes.data());
  const uint32_t k = codec_kept(shape, kCodecBlock);
  std::byte* indices = bytes.data() + sizeof(CodecHeader) + k * sizeof(float);
  std::swap_ranges(indices + 2000, indices + 2002, indices + 4000);  // in the first block: no longer ascending
  int runs = 0;
  const auto decodes = [&](const CodecRange& range) {
    return codec_decode(shape, bytes.data(), bytes.size(), shared.data(), range,
                        [&](uint64_t, uint64_t, const void*) { return ++runs > 0; });
  };
  EXPECT_FALSE(decodes({0, 70'000, 1}));
  EXPECT_EQ(runs, 0);
  EXPECT_TRUE(decodes({kCodecBlock, 4000, 1}));  // the second block is unchanged
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace moeccl::kernels
