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
    return _mm512_cmpge_epu32_mask((__m512i)bits, (__m512i)threshold);
  }
};

}  // namespace

const CodecTable& avx512_codec() {
  static constexpr CodecTable table = simd::make_codec<CodecAvx512>("avx512");
  return table;
}

}  // namespace moeccl::kernels
