// SPDX-License-Identifier: Apache-2.0
#include <immintrin.h>

#include "kernels/host/simd_codec.h"

namespace moeccl::kernels {
namespace {

struct CodecAvx2 {
  typedef float F __attribute__((vector_size(32)));
  typedef uint32_t U32 __attribute__((vector_size(32)));
  static F load_fp32(const char* p) { return (F)_mm256_loadu_ps(reinterpret_cast<const float*>(p)); }
  static F load_bf16(const char* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
  }
  static uint32_t at_least(U32 bits, U32 threshold) {
    const __m256i less = _mm256_cmpgt_epi32((__m256i)threshold, (__m256i)bits);
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(less))) ^ 0xffu;
  }
  static uint32_t collect(uint32_t mask, uint32_t first, F d, uint32_t* index, float* residual) {
    return simd::collect_each<CodecAvx2>(mask, first, d, index, residual);
  }
};

}  // namespace

const CodecTable& avx2_codec() {
  static constexpr CodecTable table = simd::make_codec<CodecAvx2>("avx2");
  return table;
}

}  // namespace moeccl::kernels
