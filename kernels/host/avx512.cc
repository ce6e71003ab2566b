// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "kernels/host/simd_table.h"

namespace moeccl::kernels {
namespace {

struct Avx512 {
  static constexpr size_t kBytes = 64;
  static constexpr size_t kUnroll = 8;  // 8 sums and 8 loads fill half of the 32 registers
  using F = simd::VecOf<float, 64>::type;
  using U32 = simd::VecOf<uint32_t, 64>::type;
  using Half = simd::VecOf<uint16_t, 32>::type;
  using Quarter = simd::VecOf<uint8_t, 16>::type;

  // The zero-masked forms with a full mask give the same instructions; the plain ones warn about GCC's own header.
  static constexpr __mmask16 kAll = 0xffff;
  static F half_to_float(Half h) { return (F)_mm512_maskz_cvtph_ps(kAll, (__m256i)h); }
  static Half float_to_half(F f) { return (Half)_mm512_maskz_cvtps_ph(kAll, (__m512)f, _MM_FROUND_TO_NEAREST_INT); }
  static U32 widen(Half h) { return (U32)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)h); }
  static U32 widen(Quarter q) { return (U32)_mm512_maskz_cvtepu8_epi32(kAll, (__m128i)q); }
  static Half narrow16(U32 v) { return (Half)_mm512_maskz_cvtepi32_epi16(kAll, (__m512i)v); }
  static Quarter narrow8(U32 v) { return (Quarter)_mm512_maskz_cvtepi32_epi8(kAll, (__m512i)v); }

  template <class V>
  static void stream(std::byte* p, V v) {
    if constexpr (sizeof(V) == 64)
      _mm512_stream_si512(reinterpret_cast<__m512i*>(p), (__m512i)v);
    else if constexpr (sizeof(V) == 32)
      _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)v);
    else
      _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)v);
  }
  static void store_fence() { _mm_sfence(); }
};

}  // namespace

const KernelTable& avx512_table() {
  static const KernelTable table = simd::make_table<Avx512>("avx512");
  return table;
}

}  // namespace moeccl::kernels
