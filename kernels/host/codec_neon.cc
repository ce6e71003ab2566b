// SPDX-License-Identifier: Apache-2.0
#include <arm_neon.h>

#include "kernels/host/simd_codec.h"

namespace moeccl::kernels {
namespace {

struct CodecNeon {
  typedef float F __attribute__((vector_size(16)));
  typedef uint32_t U32 __attribute__((vector_size(16)));
  static F load_fp32(const char* p) {
    F f;
    std::memcpy(&f, p, sizeof(f));
    return f;
  }
  static F load_bf16(const char* p) {
    uint16x4_t half;
    std::memcpy(&half, p, sizeof(half));
    return (F)vshll_n_u16(half, 16);
  }
  static uint32_t at_least(U32 bits, U32 threshold) {
    constexpr U32 kBits = {1, 2, 4, 8};
    return vaddvq_u32((uint32x4_t)((bits >= threshold) & kBits));
  }
  static uint32_t collect(uint32_t mask, uint32_t first, F d, uint32_t* index, float* residual) {
    return simd::collect_each<CodecNeon>(mask, first, d, index, residual);
  }
};

}  // namespace

const CodecTable& neon_codec() {
  static constexpr CodecTable table = simd::make_codec<CodecNeon>("neon");
  return table;
}

}  // namespace moeccl::kernels
