// What an element of each data type is to the reference kernels: how it is loaded into its accumulator and rounded
// back. Never include this in an overlay (see float_formats.h).
#pragma once

#include <cstddef>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/float_formats.h"
#include "kernels/table.h"

namespace moeccl::kernels {

template <class T>
struct NativeFloat {
  using Stored = T;
  using Acc = T;
  static constexpr bool kIsFloat = true;
  static Acc load(Stored v) { return v; }
  static Stored round(Acc v) { return v; }
};

template <class Format, class Bits>
struct NarrowFloat {
  using Stored = Bits;
  using Acc = float;
  static constexpr bool kIsFloat = true;
  static Acc load(Stored v) { return Format::decode(v); }
  static Stored round(Acc v) { return static_cast<Stored>(Format::encode(v)); }
};

template <class T>
struct Integer {
  using Stored = T;
  using Acc = T;
  static constexpr bool kIsFloat = false;
  static Acc load(Stored v) { return v; }
  static Stored round(Acc v) { return v; }
};

template <int kType>
struct ElementOf;
template <>
struct ElementOf<moecclInt8> : Integer<int8_t> {};
template <>
struct ElementOf<moecclUint8> : Integer<uint8_t> {};
template <>
struct ElementOf<moecclInt32> : Integer<int32_t> {};
template <>
struct ElementOf<moecclUint32> : Integer<uint32_t> {};
template <>
struct ElementOf<moecclInt64> : Integer<int64_t> {};
template <>
struct ElementOf<moecclUint64> : Integer<uint64_t> {};
template <>
struct ElementOf<moecclFloat16> : NarrowFloat<Fp16, uint16_t> {};
template <>
struct ElementOf<moecclFloat32> : NativeFloat<float> {};
template <>
struct ElementOf<moecclFloat64> : NativeFloat<double> {};
template <>
struct ElementOf<moecclBfloat16> : NarrowFloat<Bf16, uint16_t> {};
template <>
struct ElementOf<moecclFloat8e4m3> : NarrowFloat<Fp8e4m3, uint8_t> {};
template <>
struct ElementOf<moecclFloat8e5m2> : NarrowFloat<Fp8e5m2, uint8_t> {};

// Buffers carry no alignment promise.
template <class E>
typename E::Acc load_at(const void* base, size_t i) {
  typename E::Stored v;
  std::memcpy(&v, static_cast<const std::byte*>(base) + i * sizeof(v), sizeof(v));
  return E::load(v);
}

template <class E>
void store_at(void* base, size_t i, typename E::Stored v) {
  std::memcpy(static_cast<std::byte*>(base) + i * sizeof(v), &v, sizeof(v));
}

// Integers wrap: the arithmetic is done in uint64_t and cut to the type, floats are left to the processor.
template <class T>
T add(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a + b;
  else
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

template <class T>
T multiply(T a, T b) {
  if constexpr (std::is_floating_point_v<T>)
    return a * b;
  else
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

template <class T>
T divide(T a, uint32_t divisor) {
  if constexpr (std::is_floating_point_v<T>)
    return a / static_cast<T>(divisor);
  else if constexpr (std::is_signed_v<T>)
    return static_cast<T>(static_cast<int64_t>(a) / static_cast<int64_t>(divisor));
  else
    return static_cast<T>(static_cast<uint64_t>(a) / divisor);
}

// The order of the tests is part of the definition: a NaN on either side wins, and of two equal values (so -0 and +0)
// the second is taken, as maxps and minps do.
template <class T>
T maximum(T a, T b) {
  return a != a ? a : (a > b ? a : b);
}
template <class T>
T minimum(T a, T b) {
  return a != a ? a : (a < b ? a : b);
}

template <ReduceOp kOp, class T>
T apply(T a, T b) {
  if constexpr (kOp == ReduceOp::kSum) return add(a, b);
  if constexpr (kOp == ReduceOp::kProd) return multiply(a, b);
  if constexpr (kOp == ReduceOp::kMax) return maximum(a, b);
  if constexpr (kOp == ReduceOp::kMin) return minimum(a, b);
}

template <class T>
T scale_as(Scalar s) {
  if constexpr (std::is_same_v<T, double>)
    return s.f64;
  else if constexpr (std::is_same_v<T, float>)
    return s.f32;
  else
    return static_cast<T>(s.u64);
}

// A double cut to 64 bits: toward zero, clamped to the range, NaN to 0. Negative values wrap into unsigned types.
template <class T>
T truncate_wide(double v) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  constexpr double kAbove = std::is_signed_v<T> ? 0x1p63 : 0x1p64;
  Wide wide;
  if (v != v)
    wide = 0;
  else if (v >= kAbove)
    wide = std::numeric_limits<Wide>::max();
  else if (v <= -0x1p63)
    wide = static_cast<Wide>(std::numeric_limits<int64_t>::min());
  else if (v < 0)
    wide = static_cast<Wide>(static_cast<int64_t>(v));
  else
    wide = static_cast<Wide>(v);
  return static_cast<T>(wide);
}

}  // namespace moeccl::kernels
