// SPDX-License-Identifier: Apache-2.0
// The codec and the shared expert through the C interface.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
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
    // Experts that share most of what they know.
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
    // Without a shared expert nearly everything is lost: the paper's Fig. 14.
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

// Whether what encoding says is lost is what decoding lacks.
template <class T, class Value>
void check_loss(std::mt19937& random, moecclDataType_t type, T (*store)(float), Value value) {
  moecclCodec_t codec = MOECCL_CODEC_INIT;
  codec.type = type;
  codec.count = 1 + random() % (random() % 8 == 0 ? 70'000 : 40);
  codec.ratio = 1 + static_cast<double>(random() % 30) / 4;
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<T> expert(codec.count), shared(codec.count), out(codec.count);
  const unsigned same = random() % 4;  // of four elements, how many are those of the shared expert
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
  codec.ratio = 0.5;
  fails(moecclCodecEncode(&codec, v, v, encoded, 1000, nullptr), "ratio is 0.5");
  codec.ratio = 0;
  codec.type = moecclInt8;
  fails(moecclCodecEncode(&codec, v, v, encoded, 1000, nullptr), "codec.type");
}

}  // namespace
}  // namespace moeccl::testing
