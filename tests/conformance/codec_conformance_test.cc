// SPDX-License-Identifier: Apache-2.0
// The codec and the shared expert through the C interface.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "moeccl/moeccl.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

TEST(Codec, SharedExpertIsTheMeanAndResidualsComeBack) {
  constexpr size_t kCount = 100'001;
  constexpr int kRanks = 3, kLocal = 2;
  run_ranks(kRanks, [](int rank, moecclComm_t comm) {
    std::mt19937 random(static_cast<uint32_t>(test_seed()));
    std::normal_distribution<float> normal;
    // Experts that share most of their values.
    std::vector<float> all(kRanks * kLocal * kCount), common(kCount);
    for (float& v : common) v = normal(random);
    for (size_t e = 0; e < kRanks * kLocal; ++e)
      for (size_t i = 0; i < kCount; ++i)
        all[e * kCount + i] = common[i] + (random() % 200 == 0 ? normal(random) : 0.0f);
    const float* mine = &all[static_cast<size_t>(rank) * kLocal * kCount];
    std::vector<float> shared(kCount), decoded(kCount);
    moecclStream_t stream = nullptr;
    MOECCL_ASSERT_OK(moecclStreamCreate(&stream));
    MOECCL_ASSERT_COMM_OK(
        moecclSharedExpert(mine, kLocal, kRanks * kLocal, shared.data(), kCount, moecclFloat32, comm, stream), comm);
    MOECCL_ASSERT_OK(moecclStreamSynchronize(stream));
    MOECCL_ASSERT_OK(moecclStreamDestroy(stream));
    for (size_t i = 0; i < kCount; i += 997) {
      double mean = 0;
      for (size_t e = 0; e < kRanks * kLocal; ++e) mean += all[e * kCount + i] / (kRanks * kLocal);
      EXPECT_NEAR(shared[i], mean, 1e-5);
    }
    moecclCodec_t codec = MOECCL_CODEC_INIT;
    codec.count = kCount;
    size_t bytes = 0;
    MOECCL_ASSERT_OK(moecclCodecBytes(&codec, &bytes));
    EXPECT_LE(bytes, kCount * 4 / 50 + 32);
    std::vector<char> encoded(bytes);
    moecclCodecError_t with{}, without{};
    MOECCL_ASSERT_OK(moecclCodecEncode(&codec, mine, shared.data(), encoded.data(), bytes, &with));
    MOECCL_ASSERT_OK(moecclCodecDecode(&codec, encoded.data(), bytes, shared.data(), decoded.data()));
    double lost = 0, whole = 0;
    for (size_t i = 0; i < kCount; ++i) {
      lost += std::pow(mine[i] - decoded[i], 2.0);
      whole += std::pow(mine[i], 2.0);
    }
    EXPECT_NEAR(with.relative, std::sqrt(lost / whole), 1e-3);
    // Without a shared expert nearly everything is lost, as in the paper's Fig. 14.
    const std::vector<float> nothing(kCount);
    MOECCL_ASSERT_OK(moecclCodecEncode(&codec, mine, nothing.data(), encoded.data(), bytes, &without));
    EXPECT_LT(with.relative, 0.1);
    EXPECT_GT(without.relative, 0.5);
  });
}

namespace {

float from_bf16(uint16_t bits) {
  const uint32_t wide = uint32_t{bits} << 16;
  float v;
  std::memcpy(&v, &wide, sizeof(v));
  return v;
}
uint16_t to_bf16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Checks that the loss that encoding reports is what decoding lacks.
template <class T, class Value>
void check_loss(std::mt19937& random, moecclDataType_t type, T (*store)(float), Value value) {
  moecclCodec_t codec = MOECCL_CODEC_INIT;
  codec.type = type;
  codec.count = 1 + random() % (random() % 8 == 0 ? 70'000 : 40);
  codec.ratio = 1 + static_cast<double>(random() % 30) / 4;
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<T> expert(codec.count), shared(codec.count), out(codec.count);
  const unsigned same = random() % 4;  // of four elements, how many equal the shared expert's
  const float scale = random() % 2 == 0 ? 1.0f : 1e-3f;
  for (size_t i = 0; i < codec.count; ++i) {
    shared[i] = store(uniform(random));
    expert[i] = random() % 4 < same ? shared[i] : store(value(shared[i]) + scale * uniform(random));
  }
  size_t bytes = 0;
  MOECCL_ASSERT_OK(moecclCodecBytes(&codec, &bytes));
  std::vector<char> encoded(bytes);
  moecclCodecError_t error{};
  MOECCL_ASSERT_OK(moecclCodecEncode(&codec, expert.data(), shared.data(), encoded.data(), bytes, &error));
  MOECCL_ASSERT_OK(moecclCodecDecode(&codec, encoded.data(), bytes, shared.data(), out.data()));
  double lost = 0, whole = 0;
  for (size_t i = 0; i < codec.count; ++i) {
    lost += std::pow(static_cast<double>(value(expert[i])) - value(out[i]), 2.0);
    whole += std::pow(static_cast<double>(value(expert[i])), 2.0);
  }
  const double relative = whole > 0 ? std::sqrt(lost / whole) : 0;
  EXPECT_NEAR(error.relative, relative, 1e-6 + 2e-3 * relative) << "count " << codec.count << " ratio " << codec.ratio;
  if (out == expert) {
    EXPECT_EQ(error.relative, 0) << "count " << codec.count << " ratio " << codec.ratio;
  }
}

}  // namespace

TEST(Codec, WhatIsLostIsWhatDecodingLacks) {
  std::mt19937 random(static_cast<uint32_t>(test_seed()));
  for (int i = 0; i < scaled(600); ++i) {
    check_loss<float>(
        random, moecclFloat32, [](float v) { return v; }, [](float v) { return v; });
    check_loss<uint16_t>(random, moecclBfloat16, to_bf16, from_bf16);
    if (::testing::Test::HasFailure()) return;
  }
}

// A program whose step and computation check their arguments, and stop when told to.
struct Fused {
  std::vector<float> experts, next;
  size_t count = 0;
  std::vector<size_t> updated, used;
  size_t stop_at = SIZE_MAX;  // calls until one fails
  static int update(void* context, int expert, size_t first, size_t n) {
    auto& self = *static_cast<Fused*>(context);
    if (self.stop_at-- == 0) return 7;
    EXPECT_EQ(first, self.updated[static_cast<size_t>(expert)]);
    const size_t at = static_cast<size_t>(expert) * self.count + first;
    std::copy_n(&self.next[at], n, &self.experts[at]);
    self.updated[static_cast<size_t>(expert)] += n;
    return 0;
  }
  static int use(void* context, size_t first, size_t n, const void* values) {
    auto& self = *static_cast<Fused*>(context);
    if (self.stop_at-- == 0) return -3;
    EXPECT_EQ(std::memcmp(values, &self.next[first], n * sizeof(float)), 0) << "from element " << first;
    self.used.push_back(n);
    return 0;
  }
};

TEST(CodecFused, StepsAndComputationsSeeEachElementOnce) {
  std::mt19937 random(static_cast<uint32_t>(test_seed()));
  std::normal_distribution<float> normal;
  constexpr size_t kExperts = 2;
  for (const double ratio : {1.0, 50.0}) {
    Fused f;
    f.count = 150'000;
    f.experts.resize(kExperts * f.count);
    f.updated.resize(kExperts);
    for (size_t i = 0; i < f.experts.size(); ++i) f.next.push_back(normal(random));
    const std::vector<float> shared(f.count, 0.5f);
    moecclCodec_t codec = MOECCL_CODEC_INIT;
    codec.count = f.count;
    codec.ratio = ratio;
    size_t bytes = 0;
    MOECCL_ASSERT_OK(moecclCodecBytes(&codec, &bytes));
    std::vector<char> expected(kExperts * bytes), encoded(expected.size());
    std::vector<float> decoded(f.count);
    moecclCodecError_t errors[kExperts] = {}, alone[kExperts] = {};
    for (size_t e = 0; e < kExperts; ++e)
      MOECCL_ASSERT_OK(
          moecclCodecEncode(&codec, &f.next[e * f.count], shared.data(), &expected[e * bytes], bytes, &alone[e]));
    MOECCL_ASSERT_OK(moecclCodecEncodeFused(&codec, f.experts.data(), kExperts, shared.data(), Fused::update, &f,
                                            encoded.data(), encoded.size(), errors));
    EXPECT_EQ(encoded, expected);
    EXPECT_EQ(f.experts, f.next);
    EXPECT_EQ(errors[1].relative, alone[1].relative);
    EXPECT_EQ(errors[1].max_dropped, alone[1].max_dropped);
    // The computation runs on everything, then on rows of the second half.
    MOECCL_ASSERT_OK(moecclCodecDecode(&codec, encoded.data(), bytes, shared.data(), f.next.data()));
    moecclExpertUse_t use = MOECCL_EXPERT_USE_INIT;
    use.use = Fused::use;
    use.context = &f;
    MOECCL_ASSERT_OK(moecclCodecDecodeFused(&codec, encoded.data(), bytes, shared.data(), &use));
    EXPECT_EQ(std::accumulate(f.used.begin(), f.used.end(), size_t{0}), f.count);
    f.used.clear();
    use.first = 75'000;
    use.row = 50'000 / 2;
    MOECCL_ASSERT_OK(moecclCodecDecodeFused(&codec, encoded.data(), bytes, shared.data(), &use));
    EXPECT_EQ(f.used, (std::vector<size_t>{25'000, 25'000, 25'000}));
  }
}

TEST(CodecFused, WhatStopsTheProgramIsSaidWithWhereItStopped) {
  Fused f;
  f.count = 100'000;
  f.experts.resize(2 * f.count);
  f.next.assign(2 * f.count, 2.0f);
  f.updated.resize(2);
  const std::vector<float> shared(f.count, 0.5f);
  moecclCodec_t codec = MOECCL_CODEC_INIT;
  codec.count = f.count;
  size_t bytes = 0;
  MOECCL_ASSERT_OK(moecclCodecBytes(&codec, &bytes));
  std::vector<char> encoded(2 * bytes);
  const auto says = [](const char* words) {
    return std::string(moecclGetLastError(nullptr)).find(words) != std::string::npos;
  };
  f.stop_at = 1;
  EXPECT_EQ(moecclCodecEncodeFused(&codec, f.experts.data(), 2, shared.data(), Fused::update, &f, encoded.data(),
                                   encoded.size(), nullptr),
            moecclInvalidUsage);
  EXPECT_TRUE(says("update returned 7 for elements 0 to 65535 of expert 1")) << moecclGetLastError(nullptr);
  EXPECT_EQ(f.updated, (std::vector<size_t>{65536, 0}));  // nothing ran after the call that failed
  EXPECT_EQ(f.experts[65535], 2.0f);
  EXPECT_EQ(f.experts[65536], 0.0f);
  MOECCL_ASSERT_OK(moecclCodecEncode(&codec, f.next.data(), shared.data(), encoded.data(), bytes, nullptr));
  MOECCL_ASSERT_OK(moecclCodecDecode(&codec, encoded.data(), bytes, shared.data(), f.next.data()));
  moecclExpertUse_t use = MOECCL_EXPERT_USE_INIT;
  use.use = Fused::use;
  use.context = &f;
  use.row = 1000;
  f.stop_at = 2;
  EXPECT_EQ(moecclCodecDecodeFused(&codec, encoded.data(), bytes, shared.data(), &use), moecclInvalidUsage);
  EXPECT_TRUE(says("use.use returned -3 for elements 32000 to 47999")) << moecclGetLastError(nullptr);
  EXPECT_EQ(f.used.size(), 2u);
  // Nothing runs when an argument is wrong.
  f.stop_at = SIZE_MAX;
  f.updated = {0, 0};
  f.used.clear();
  const auto refused = [&](moecclResult_t result, const char* words) {
    EXPECT_EQ(result, moecclInvalidArgument);
    EXPECT_TRUE(says(words)) << moecclGetLastError(nullptr);
  };
  const auto encode = [&](size_t n, moecclExpertUpdateFn_t update, size_t room) {
    return moecclCodecEncodeFused(&codec, f.experts.data(), n, shared.data(), update, &f, encoded.data(), room,
                                  nullptr);
  };
  refused(encode(2, nullptr, 2 * bytes), "update is NULL");
  refused(encode(0, Fused::update, 2 * bytes), "n is 0");
  refused(encode(2, Fused::update, 2 * bytes - 1), "bytes is");
  const auto decode = [&] { return moecclCodecDecodeFused(&codec, encoded.data(), bytes, shared.data(), &use); };
  use.row = 1001;
  refused(decode(), "use.row is 1001");
  use.row = 0, use.first = f.count + 1;
  refused(decode(), "use.first is 100001");
  use.first = 1, use.count = f.count;
  refused(decode(), "use.count is 100000");
  use.count = 0, use.use = nullptr;
  refused(decode(), "use.use is NULL");
  use.use = Fused::use, use.size = 3;
  refused(decode(), "use.size is 3");
  use.size = sizeof(use), encoded[0] ^= 1;
  refused(decode(), "not an expert");
  EXPECT_EQ(f.updated, (std::vector<size_t>{0, 0}));
  EXPECT_TRUE(f.used.empty());
}

TEST(Codec, BadArgumentsAreNamed) {
  moecclCodec_t codec = MOECCL_CODEC_INIT;
  size_t size = 0;
  EXPECT_EQ(moecclCodecBytes(&codec, &size), moecclInvalidArgument);
  EXPECT_NE(std::string(moecclGetLastError(nullptr)).find("codec.count is 0"), std::string::npos);
  codec.count = 50;
  float v[100] = {};
  char encoded[1000];
  const auto fails = [&](moecclResult_t result, const char* word) {
    EXPECT_EQ(result, moecclInvalidArgument);
    EXPECT_NE(std::string(moecclGetLastError(nullptr)).find(word), std::string::npos) << moecclGetLastError(nullptr);
  };
  fails(moecclCodecEncode(nullptr, v, v, encoded, 1000, nullptr), "codec is NULL");
  fails(moecclCodecEncode(&codec, v, nullptr, encoded, 1000, nullptr), "shared is NULL");
  fails(moecclCodecEncode(&codec, v, v, encoded, 3, nullptr), "bytes is 3");
  fails(moecclCodecDecode(&codec, encoded, 1000, v, nullptr), "out is NULL");
  std::memset(encoded, 0, sizeof(encoded));
  fails(moecclCodecDecode(&codec, encoded, 1000, v, v + 50), "not an expert");
  fails(moecclCodecDecode(&codec, encoded, 1000, v, v), "out overlaps shared");
  fails(moecclCodecDecode(&codec, encoded, 1000, v, v + 1), "out overlaps shared");
  fails(moecclCodecDecode(&codec, v + 30, 280, v + 50, v), "out overlaps encoded");
  codec.ratio = 0.5;
  fails(moecclCodecEncode(&codec, v, v, encoded, 1000, nullptr), "ratio is 0.5");
  codec.ratio = 0;
  codec.type = moecclInt8;
  fails(moecclCodecEncode(&codec, v, v, encoded, 1000, nullptr), "codec.type");
}

}  // namespace
}  // namespace moeccl::testing
