// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "kernels/host/simd_table.h"

namespace moeccl::kernels {
namespace {

struct Avx2 {
  static constexpr size_t kBytes = 32;
  static constexpr size_t kUnroll = 4;  // 4 sums, 4 loads and a scale, of 16 registers
  using F = simd::VecOf<float, 32>::type;
  using U32 = simd::VecOf<uint32_t, 32>::type;
  using Half = simd::VecOf<uint16_t, 16>::type;
  using Quarter = uint64_t;  // 8 bytes: a vector of that size would be MMX

  static F half_to_float(Half h) { return (F)_mm256_cvtph_ps((__m128i)h); }
  static Half float_to_half(F f) { return (Half)_mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT); }
  static U32 widen(Half h) { return (U32)_mm256_cvtepu16_epi32((__m128i)h); }
  static U32 widen(Quarter q) { return (U32)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(q))); }
  // The values fit, so the packs never saturate.
  static Half narrow16(U32 v) {
    return (Half)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  }
  static Quarter narrow8(U32 v) {
    const __m128i half = (__m128i)narrow16(v);
    return static_cast<Quarter>(_mm_cvtsi128_si64(_mm_packus_epi16(half, half)));
  }

  template <class V>
  static void stream(std::byte* p, V v) {
    if constexpr (sizeof(V) == 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
    else if constexpr (sizeof(V) == 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
    else
      _mm_stream_si64(reinterpret_cast<long long*>(p), static_cast<long long>(v));
  }
  static void store_fence() { _mm_sfence(); }
};

}  // namespace

const KernelTable& avx2_table() {
  static const KernelTable table = simd::make_table<Avx2>("avx2");
  return table;
}

}  // namespace moeccl::kernels
