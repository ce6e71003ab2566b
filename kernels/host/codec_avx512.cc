// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "kernels/host/simd_codec.h"

namespace moeccl::kernels {
namespace {

struct CodecAvx512 {
  typedef float F __attribute__((vector_size(64)));
  typedef uint32_t U32 __attribute__((vector_size(64)));
  static F load_fp32(const char* p) { return (F)_mm512_loadu_ps(reinterpret_cast<const float*>(p)); }
  static F load_bf16(const char* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (F)((U32)_mm512_maskz_cvtepu16_epi32(0xffff, half) << 16);
  }
  static uint32_t at_least(U32 bits, U32 threshold) {
    uint32_t mask = _mm512_cmpge_epu32_mask((__m512i)bits, (__m512i)threshold);
    // gcc 12.2 (-O1 -fsanitize=address,undefined) spills the 16 bits that it knows of with kmovw and lets popcnt read
    // 32 from there. After this statement, it knows of 32 bits, in a general register.
    __asm__("" : "+r"(mask));
    return mask;
  }
  // This has no branch: one in a hundred elements is taken, which no predictor foresees. The packing goes to a register
  // first, because the form that stores is slow on AMD's cores.
  static uint32_t collect(uint32_t mask, uint32_t first, F d, uint32_t* index, float* residual) {
    const auto m = static_cast<__mmask16>(mask);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i numbers = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(first)));
    _mm512_storeu_ps(residual, _mm512_maskz_compress_ps(m, (__m512)d));
    _mm512_storeu_si512(index, _mm512_maskz_compress_epi32(m, numbers));
    return static_cast<uint32_t>(__builtin_popcount(mask));
  }
};

}  // namespace

const CodecTable& avx512_codec() {
  static constexpr CodecTable table = simd::make_codec<CodecAvx512>("avx512");
  return table;
}

}  // namespace moeccl::kernels
