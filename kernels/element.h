// SPDX-License-Identifier: Apache-2.0
// The element of each data type and the arithmetic of its accumulator. Host and device share this source and get the
// same bits. On the device it is compiled without contraction (-fmad=false) and without flushing subnormals. Never
// include it in an overlay (see float_formats.h).
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/float_formats.h"

namespace moeccl::kernels {

// Loads an element into its accumulator, and rounds back.
template <class T>
struct Native {
  using Stored = T;
  using Acc = T;
  static constexpr bool kIsFloat = std::is_floating_point_v<T>;
  static MOECCL_FORMAT Acc load(Stored v) { return v; }
  static MOECCL_FORMAT Stored round(Acc v) { return v; }
};
template <class Format, class Bits>
struct Narrow {
  using Stored = Bits;
  using Acc = float;
  static constexpr bool kIsFloat = true;
  static MOECCL_FORMAT Acc load(Stored v) { return Format::decode(v); }
  static MOECCL_FORMAT Stored round(Acc v) { return static_cast<Stored>(Format::encode(v)); }
};

// Integers wrap: their arithmetic is done in uint64_t and truncated to the type. The processor handles floats.
template <class T>
MOECCL_FORMAT T add(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a + b;
  else
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <class T>
MOECCL_FORMAT T multiply(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a * b;
  else
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class T>
MOECCL_FORMAT T divide(T a, uint32_t divisor) {
  if constexpr (std::is_floating_point_v<T>)
    return a / static_cast<T>(divisor);
  else if constexpr (std::is_signed_v<T>)
    return static_cast<T>(static_cast<int64_t>(a) / static_cast<int64_t>(divisor));
  else
    return static_cast<T>(static_cast<uint64_t>(a) / divisor);
}

// The order of the tests is part of the definition: a NaN on either side wins, and of two equal values (so of -0 and
// +0) the second is taken, as in maxps and minps.
template <class T>
MOECCL_FORMAT T maximum(T a, T b) {
  return a != a ? a : (a > b ? a : b);
}
template <class T>
MOECCL_FORMAT T minimum(T a, T b) {
  return a != a ? a : (a < b ? a : b);
}

// Truncates a double to 64 bits: toward zero, clamped to the range, NaN to 0. Negative values wrap in unsigned types.
template <class T>
MOECCL_FORMAT T truncate(double v) {
  constexpr bool kSigned = std::is_signed_v<T>;
  constexpr double kAbove = kSigned ? 9223372036854775808.0 : 18446744073709551616.0;
  uint64_t wide;
  if (v != v)
    wide = 0;
  else if (v >= kAbove)
    wide = kSigned ? 0x7fffffffffffffffull : ~0ull;
  else if (v <= -9223372036854775808.0)
    wide = 0x8000000000000000ull;
  else if (kSigned || v < 0)
    wide = static_cast<uint64_t>(static_cast<int64_t>(v));
  else
    wide = static_cast<uint64_t>(v);
  return static_cast<T>(wide);
}

// Returns weight * v in the arithmetic of rows. Partial sums have the weight 1, and those of 64-bit integers may be
// numbers that a double does not hold.
template <class T>
MOECCL_FORMAT T weigh(T v, float weight) {
  if constexpr (std::is_floating_point_v<T>)
    return static_cast<T>(weight) * v;
  else
    return weight == 1 ? v : truncate<T>(static_cast<double>(weight) * static_cast<double>(v));
}

}  // namespace moeccl::kernels
