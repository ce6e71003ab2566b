// SPDX-License-Identifier: Apache-2.0
// Scalar conversions of the 8- and 16-bit float formats: the definition that every table follows. All roundings are to
// nearest even. A NaN stays a NaN; its payload is not kept, and only this code keeps its sign.
//   fp16, bf16, fp8 e5m2: as in IEEE 754, values that do not fit become infinity, and infinities pass unchanged.
//   fp8 e4m3 (OCP "fn": no infinities, NaN is 0x7f and 0xff): values that do not fit, infinities included, become
//   +-448, as with CUDA's __NV_SATFINITE.
// Host and device share this source. Never include it in an overlay, because its inline functions must not be emitted
// with AVX flags.
#pragma once

#include <bit>
#include <cstdint>

#if defined(__CUDACC__)
#define MOECCL_FORMAT __device__ __forceinline__
#else
#define MOECCL_FORMAT constexpr
#endif

namespace moeccl::kernels {

#if defined(__CUDACC__)
MOECCL_FORMAT float float_of(uint32_t bits) { return __uint_as_float(bits); }
MOECCL_FORMAT uint32_t bits_of(float value) { return __float_as_uint(value); }
#else
MOECCL_FORMAT float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
MOECCL_FORMAT uint32_t bits_of(float value) { return std::bit_cast<uint32_t>(value); }
#endif

// The layout is a sign, kExponentBits with the usual bias, and kMantissaBits.
template <int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct SmallFloat {
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr uint32_t kMagnitudeMask = (1u << (kExponentBits + kMantissaBits)) - 1;
  static constexpr uint32_t kSignShift = 31 - (kExponentBits + kMantissaBits);
  static constexpr uint32_t kNan = kMagnitudeMask;
  // With infinity, this is its pattern. Without, it is the largest finite value, one below the only NaN.
  static constexpr uint32_t kOverflow =
      kHasInfinity ? ((1u << kExponentBits) - 1) << kMantissaBits : kMagnitudeMask - 1;
  // Magnitudes below 2^(1-kBias), as a float's bits, are subnormal in this format.
  static constexpr uint32_t kMinNormal = static_cast<uint32_t>(127 + 1 - kBias) << 23;

  static MOECCL_FORMAT float decode(uint32_t bits) {
    const uint32_t sign = (bits << kSignShift) & 0x80000000u;
    const uint32_t magnitude = bits & kMagnitudeMask;
    if (magnitude > kOverflow) return float_of(sign | 0x7fc00000u);
    if (kHasInfinity && magnitude == kOverflow) return float_of(sign | 0x7f800000u);
    // A subnormal is an integer number of steps of 2^(1 - kBias - kMantissaBits), which is a normal float.
    const uint32_t step = static_cast<uint32_t>(127 + 1 - kBias - kMantissaBits) << 23;
    const uint32_t wide = (magnitude >> kMantissaBits) != 0
                              ? (magnitude << kDropped) + (static_cast<uint32_t>(127 - kBias) << 23)
                              : bits_of(static_cast<float>(magnitude) * float_of(step));
    return float_of(sign | wide);
  }

  static MOECCL_FORMAT uint32_t encode(float value) {
    const uint32_t bits = bits_of(value);
    const uint32_t sign = (bits & 0x80000000u) >> kSignShift;
    const uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | kNan;
    if (magnitude < kMinNormal) {
      // The last place of this float is one step of the format, so adding it rounds to whole steps.
      const uint32_t rounder = static_cast<uint32_t>(127 + 1 - kBias + kDropped) << 23;
      const float sum = float_of(magnitude) + float_of(rounder);
      return sign | (bits_of(sum) - rounder);
    }
    const uint32_t half = (1u << (kDropped - 1)) - 1 + ((magnitude >> kDropped) & 1);
    const uint32_t narrow = (magnitude + half - (static_cast<uint32_t>(127 - kBias) << 23)) >> kDropped;
    return sign | (narrow > kOverflow ? kOverflow : narrow);
  }
};

using Fp16 = SmallFloat<5, 10, true>;
using Fp8e4m3 = SmallFloat<4, 3, false>;
using Fp8e5m2 = SmallFloat<5, 2, true>;

// bf16 shares fp32's exponent, so subnormals need no special case.
struct Bf16 {
  static MOECCL_FORMAT float decode(uint32_t bits) { return float_of(bits << 16); }
  static MOECCL_FORMAT uint32_t encode(float value) {
    const uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return ((bits >> 16) & 0x8000u) | 0x7fc0u;
    return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
  }
};

}  // namespace moeccl::kernels
