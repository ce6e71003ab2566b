// SPDX-License-Identifier: Apache-2.0
// Compares the widest vectors' scan with a loop, element by element: how many candidates it finds, which ones, and that
// it does not write past them. On x86-64 built a second time with the options under which a compiler has counted them
// wrong (tests/meson.build).
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "kernels/host/codec_tables.h"

namespace moeccl::kernels {
namespace {

// Null: this processor does not run it.
const CodecTable* widest() {
#if defined(__x86_64__)
  const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return runs ? &avx512_codec() : nullptr;
#else
  return &neon_codec();
#endif
}

template <class Element>
void scan_random(CodecScanFn scan, std::mt19937& random) {
  const auto count = static_cast<uint32_t>(1 + random() % 400);
  constexpr int kShift = sizeof(Element) == 2 ? 16 : 0;
  std::vector<Element> expert(count), shared(count);
  for (Element& e : expert) {
    const float f = std::normal_distribution<float>()(random);
    uint32_t bits;
    std::memcpy(&bits, &f, sizeof(bits));
    e = static_cast<Element>(bits >> kShift);
  }
  const float cut = random() % 4 == 0 ? 0.0f : std::normal_distribution<float>()(random);
  uint32_t threshold;
  std::memcpy(&threshold, &cut, sizeof(threshold));
  threshold &= 0x7fffffffu;
  std::vector<uint32_t> index(count + kCodecLanes, 0xdeadbeef), expected;
  std::vector<float> residual(count + kCodecLanes), squares(2 * kCodecLanes);
  for (uint32_t i = 0; i < count; ++i)
    if ((static_cast<uint32_t>(expert[i]) << kShift & 0x7fffffffu) >= threshold) expected.push_back(i);
  CodecScan s;
  s.expert = expert.data();
  s.shared = shared.data();
  s.count = count;
  s.threshold = threshold;
  s.index = index.data();
  s.residual = residual.data();
  s.residual_squares = squares.data();
  s.expert_squares = squares.data() + kCodecLanes;
  ASSERT_EQ(scan(s), expected.size()) << count << " elements";
  index.resize(expected.size());
  ASSERT_EQ(index, expected);
}

TEST(CodecMask, CountsTheBitsOfEachMask) {
  const CodecTable* const codec = widest();
  if (codec == nullptr) GTEST_SKIP() << "this processor has no AVX-512";
  std::mt19937 random(7);
  for (int i = 0; i < 500; ++i) {
    scan_random<uint32_t>(codec->scan_fp32, random);
    scan_random<uint16_t>(codec->scan_bf16, random);
  }
}

}  // namespace
}  // namespace moeccl::kernels
