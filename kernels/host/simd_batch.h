// SPDX-License-Identifier: Apache-2.0
// The overlays' register of elements of each data type, which loads into accumulators and rounds back.
//
// The vector kernels (simd_*.h) are written once, over the compiler's vector types. avx2.cc and avx512.cc instantiate
// them with their own Isa, which is in an unnamed namespace there. So every function of an instantiation is local to
// its file, and the linker can never choose an AVX-512 copy of an inline function for a caller that must not run it.
// For the same reason, nothing here calls inline functions of the standard library.
//
// An Isa supplies kBytes (of a register), kUnroll, the types F, U32, Half, Quarter, and the functions half_to_float,
// float_to_half, widen, narrow16, narrow8, stream, store_fence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/host/tables.h"

// Placed before a loop over registers, which is then unrolled at any level of optimization. At -O2, GCC would otherwise
// keep the registers on the stack (unrolling makes a reduction of 4 sources in the cache 2.5 times as fast,
// docs/decisions.md).
#if defined(__clang__)
#define MOECCL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MOECCL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace moeccl::kernels::simd {

template <class T, size_t kBytes>
struct VecOf {
  typedef T type __attribute__((vector_size(kBytes)));
};

// The parameter Isa keeps this function local to the overlay.
template <class Isa, class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

// The members of every kind of batch. Acc holds the accumulators of the kLanes elements of one Packed.
template <class Isa, class S, class PackedBits, class AccVectors, class AccLane>
struct Batch {
  using isa = Isa;
  using Stored = S;
  using Packed = PackedBits;
  using Acc = AccVectors;
  using Lane = AccLane;
  static constexpr size_t kLanes = sizeof(Packed) / sizeof(Stored);
  static constexpr size_t kUnroll = Isa::kUnroll;
  // Stores the accumulators in the order of their elements.
  static void to_lanes(Lane* lanes, Acc acc) { std::memcpy(lanes, &acc, sizeof(acc)); }
};

template <class Isa, class T>
struct NativeFloat : Batch<Isa, T, typename VecOf<T, Isa::kBytes>::type, typename VecOf<T, Isa::kBytes>::type, T> {
  using V = typename VecOf<T, Isa::kBytes>::type;
  static V unpack(V v) { return v; }
  static V pack(V v) { return v; }
  static V splat(T s) { return s - V{}; }
  static V maximum(V a, V b) { return a != a ? a : (a > b ? a : b); }
  static V minimum(V a, V b) { return a != a ? a : (a < b ? a : b); }
};

template <class Isa>
struct Fp32 : NativeFloat<Isa, float> {
  static constexpr int kType = moecclFloat32;
  static auto scale(Scalar s) { return Fp32::splat(s.f32); }
};

template <class Isa>
struct Fp64 : NativeFloat<Isa, double> {
  static constexpr int kType = moecclFloat64;
  static auto scale(Scalar s) { return Fp64::splat(s.f64); }
};

// The formats that compute in fp32.
template <class Isa, class S, class PackedBits>
struct ViaFloat : Batch<Isa, S, PackedBits, typename Isa::F, float> {
  using Wide = Fp32<Isa>;
  using F = typename Isa::F;
  static F splat(float s) { return Wide::splat(s); }
  static F scale(Scalar s) { return Wide::splat(s.f32); }
  static F maximum(F a, F b) { return Wide::maximum(a, b); }
  static F minimum(F a, F b) { return Wide::minimum(a, b); }
};

template <class Isa>
struct Fp16 : ViaFloat<Isa, uint16_t, typename Isa::Half> {
  static constexpr int kType = moecclFloat16;
  static typename Isa::F unpack(typename Isa::Half h) { return Isa::half_to_float(h); }
  static typename Isa::Half pack(typename Isa::F f) { return Isa::float_to_half(f); }
};

// The even elements of a register of 16-bit values, and the odd ones.
template <class Isa>
struct Pair {
  typename Isa::F even, odd;
  friend Pair operator+(Pair a, Pair b) { return {a.even + b.even, a.odd + b.odd}; }
  friend Pair operator*(Pair a, Pair b) { return {a.even * b.even, a.odd * b.odd}; }
  friend Pair operator/(Pair a, Pair b) { return {a.even / b.even, a.odd / b.odd}; }
};

// A bf16 is the upper half of its fp32, so even and odd elements are split and merged by shifts and masks in place, at
// half the cost of widening and narrowing.
template <class Isa>
struct Bf16 : Batch<Isa, uint16_t, typename Isa::U32, Pair<Isa>, float> {
  using Wide = Fp32<Isa>;
  using F = typename Isa::F;
  using U32 = typename Isa::U32;
  static constexpr int kType = moecclBfloat16;
  static constexpr size_t kUnroll = Isa::kUnroll / 2;
  static constexpr uint32_t kUpper = 0xffff0000u;

  static Pair<Isa> unpack(U32 v) { return {bit_cast<Isa, F>(v << 16), bit_cast<Isa, F>(v & kUpper)}; }
  static U32 pack(Pair<Isa> p) { return (rounded(p.even) >> 16) | (rounded(p.odd) & kUpper); }
  static Pair<Isa> splat(float s) { return {Wide::splat(s), Wide::splat(s)}; }
  static Pair<Isa> scale(Scalar s) { return splat(s.f32); }
  static Pair<Isa> maximum(Pair<Isa> a, Pair<Isa> b) {
    return {Wide::maximum(a.even, b.even), Wide::maximum(a.odd, b.odd)};
  }
  static Pair<Isa> minimum(Pair<Isa> a, Pair<Isa> b) {
    return {Wide::minimum(a.even, b.even), Wide::minimum(a.odd, b.odd)};
  }
  static void to_lanes(float* lanes, Pair<Isa> p) {
    for (size_t i = 0; i < Bf16::kLanes / 2; ++i) {
      lanes[2 * i] = p.even[i];
      lanes[2 * i + 1] = p.odd[i];
    }
  }

 private:
  // Returns values rounded to bf16 in the upper half. vcvtneps2bf16 is not used, because it flushes subnormals and the
  // reference does not.
  static U32 rounded(F f) {
    const U32 bits = bit_cast<Isa, U32>(f);
    return f != f ? bits | 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  }
};

// The vector form of SmallFloat in float_formats.h, where the arithmetic is explained.
template <class Isa, int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct Fp8 : ViaFloat<Isa, uint8_t, typename Isa::Quarter> {
  using F = typename Isa::F;
  using U32 = typename Isa::U32;
  static constexpr size_t kUnroll = 2;  // the conversions use up the registers and the time
  static constexpr uint32_t kBias = (1u << (kExponentBits - 1)) - 1;
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr uint32_t kOverflow = kHasInfinity ? 0x7cu : 0x7eu;
  static constexpr uint32_t kRebias = (127u - kBias) << 23;
  static constexpr uint32_t kMinNormal = (127u + 1 - kBias) << 23;
  static constexpr uint32_t kStep = (127u + 1 - kBias - kMantissaBits) << 23;
  static constexpr uint32_t kRounder = (127u + 1 - kBias + kDropped) << 23;

  static F constant(uint32_t bits) { return bit_cast<Isa, F>(bits + U32{}); }

  static F unpack(typename Isa::Quarter q) {
    using I32 = typename VecOf<int32_t, Isa::kBytes>::type;
    const U32 bits = Isa::widen(q);
    const U32 magnitude = bits & 0x7fu;
    const U32 normal = (magnitude << kDropped) + kRebias;
    const F steps = __builtin_convertvector(bit_cast<Isa, I32>(magnitude), F);
    const U32 subnormal = bit_cast<Isa, U32>(steps * constant(kStep));
    U32 wide = magnitude < (1u << kMantissaBits) ? subnormal : normal;
    if constexpr (kHasInfinity) wide = magnitude == kOverflow ? 0x7f800000u + U32{} : wide;
    wide = magnitude > kOverflow ? 0x7fc00000u + U32{} : wide;
    return bit_cast<Isa, F>(wide | ((bits & 0x80u) << 24));
  }

  static typename Isa::Quarter pack(F f) {
    const U32 bits = bit_cast<Isa, U32>(f);
    const U32 magnitude = bits & 0x7fffffffu;
    const U32 subnormal = bit_cast<Isa, U32>(bit_cast<Isa, F>(magnitude) + constant(kRounder)) - kRounder;
    const U32 half = ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1u);
    U32 narrow = (magnitude + half - kRebias) >> kDropped;
    narrow = narrow > kOverflow ? kOverflow + U32{} : narrow;
    narrow = magnitude < kMinNormal ? subnormal : narrow;
    narrow = magnitude > 0x7f800000u ? 0x7fu + U32{} : narrow;
    return Isa::narrow8(narrow | ((bits >> 24) & 0x80u));
  }
};

template <class Isa>
struct Fp8e4m3 : Fp8<Isa, 4, 3, false> {
  static constexpr int kType = moecclFloat8e4m3;
};
template <class Isa>
struct Fp8e5m2 : Fp8<Isa, 5, 2, true> {
  static constexpr int kType = moecclFloat8e5m2;
};

// Accumulates in the unsigned type, whose overflow is defined; only comparisons look at the sign.
template <class Isa, class Unsigned, class T, int kDataType>
struct Integer : Batch<Isa, Unsigned, typename VecOf<Unsigned, Isa::kBytes>::type,
                       typename VecOf<Unsigned, Isa::kBytes>::type, Unsigned> {
  using V = typename VecOf<Unsigned, Isa::kBytes>::type;
  using Ordered = typename VecOf<T, Isa::kBytes>::type;
  static constexpr int kType = kDataType;
  static V unpack(V v) { return v; }
  static V pack(V v) { return v; }
  static V scale(Scalar s) { return static_cast<Unsigned>(s.u64) + V{}; }
  static V maximum(V a, V b) { return bit_cast<Isa, Ordered>(a) > bit_cast<Isa, Ordered>(b) ? a : b; }
  static V minimum(V a, V b) { return bit_cast<Isa, Ordered>(a) < bit_cast<Isa, Ordered>(b) ? a : b; }
};

template <ReduceOp kOp, class B>
inline typename B::Acc apply(typename B::Acc a, typename B::Acc b) {
  if constexpr (kOp == ReduceOp::kSum) return a + b;
  if constexpr (kOp == ReduceOp::kProd) return a * b;
  if constexpr (kOp == ReduceOp::kMax) return B::maximum(a, b);
  if constexpr (kOp == ReduceOp::kMin) return B::minimum(a, b);
}

template <class B>
inline typename B::Acc load(const std::byte* p) {
  typename B::Packed v;
  std::memcpy(&v, p, sizeof(v));
  return B::unpack(v);
}

template <class B>
inline void store(std::byte* p, typename B::Acc acc, bool stream) {
  const typename B::Packed v = B::pack(acc);
  if (stream)
    B::isa::stream(p, v);
  else
    std::memcpy(p, &v, sizeof(v));
}

// Always inlined, because an array of accumulators whose address escapes stays in memory.
template <class B, size_t kBatches>
[[gnu::always_inline]] inline void load_all(typename B::Acc (&to)[kBatches], const std::byte* p) {
  MOECCL_UNROLL
  for (size_t u = 0; u < kBatches; ++u) to[u] = load<B>(p + u * sizeof(typename B::Packed));
}

template <class B, size_t kBatches>
[[gnu::always_inline]] inline void store_all(std::byte* p, const typename B::Acc (&from)[kBatches], bool stream) {
  if (stream) {
    MOECCL_UNROLL
    for (size_t u = 0; u < kBatches; ++u) store<B>(p + u * sizeof(typename B::Packed), from[u], true);
  } else {
    MOECCL_UNROLL
    for (size_t u = 0; u < kBatches; ++u) store<B>(p + u * sizeof(typename B::Packed), from[u], false);
  }
}

// Returns the value that a store followed by a load would give.
template <class B>
inline typename B::Acc round(typename B::Acc acc) {
  return B::unpack(B::pack(acc));
}

// Copies n bytes, kWord <= n <= 2 * kWord, as two moves that may overlap.
template <class Isa, class Word>
inline void copy_as(std::byte* to, const std::byte* from, size_t n) {
  Word first, last;
  std::memcpy(&first, from, sizeof(Word));
  std::memcpy(&last, from + n - sizeof(Word), sizeof(Word));
  std::memcpy(to, &first, sizeof(Word));
  std::memcpy(to + n - sizeof(Word), &last, sizeof(Word));
}

// Copies n < 64 bytes. The compiler's own copy of so few bytes is a string instruction, which costs ten times as much.
template <class Isa>
inline void copy_some(std::byte* to, const std::byte* from, size_t n) {
  if (n >= 32) return copy_as<Isa, typename VecOf<float, 32>::type>(to, from, n);
  if (n >= 16) return copy_as<Isa, typename VecOf<float, 16>::type>(to, from, n);
  if (n >= 8) return copy_as<Isa, uint64_t>(to, from, n);
  if (n >= 4) return copy_as<Isa, uint32_t>(to, from, n);
  if (n >= 2) return copy_as<Isa, uint16_t>(to, from, n);
  if (n == 1) *to = *from;
}

// Loads the first n < kLanes elements and sets the rest of the register to zero.
template <class B>
inline typename B::Acc load_some(const std::byte* p, size_t n) {
  typename B::Packed v{};
  copy_some<typename B::isa>(reinterpret_cast<std::byte*>(&v), p, n * sizeof(typename B::Stored));
  return B::unpack(v);
}

template <class B>
inline void store_some(std::byte* p, typename B::Acc acc, size_t n) {
  const typename B::Packed v = B::pack(acc);
  copy_some<typename B::isa>(p, reinterpret_cast<const std::byte*>(&v), n * sizeof(typename B::Stored));
}

// Prefetches into the second-level cache, so far ahead that the first level would lose it. Any address is allowed.
template <class Isa>
inline void prefetch(const std::byte* base, size_t offset) {
  __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(base) + offset), 0, 2);
}

}  // namespace moeccl::kernels::simd
