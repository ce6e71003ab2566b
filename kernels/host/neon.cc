// SPDX-License-Identifier: Apache-2.0
#include <arm_neon.h>

#include "kernels/host/simd_table.h"

namespace moeccl::kernels {
namespace {

struct Neon {
  static constexpr size_t kBytes = 16;
  static constexpr size_t kUnroll = 8;  // 8 sums and 8 loads fill half of the 32 registers
  using F = simd::VecOf<float, 16>::type;
  using U32 = simd::VecOf<uint32_t, 16>::type;
  using Half = simd::VecOf<uint16_t, 8>::type;
  using Quarter = uint32_t;

  static F half_to_float(Half h) { return (F)vcvt_f32_f16((float16x4_t)h); }
  static Half float_to_half(F f) { return (Half)vcvt_f16_f32((float32x4_t)f); }
  static U32 widen(Half h) { return (U32)vmovl_u16((uint16x4_t)h); }
  static U32 widen(Quarter q) { return widen((Half)vget_low_u16(vmovl_u8(vcreate_u8(q)))); }
  static Half narrow16(U32 v) { return (Half)vmovn_u32((uint32x4_t)v); }
  static Quarter narrow8(U32 v) {
    const uint16x4_t half = (uint16x4_t)narrow16(v);
    return vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(half, half))), 0);
  }

  // The core sees by itself that whole lines are written one after the other, and stops reading them first.
  template <class V>
  static void stream(std::byte* p, V v) {
    std::memcpy(p, &v, sizeof(v));
  }
  static void store_fence() {}  // these are ordinary stores, which the next release orders
};

}  // namespace

const KernelTable& neon_table() {
  static const KernelTable table = simd::make_table<Neon>("neon");
  return table;
}

}  // namespace moeccl::kernels
