// What an element of each type is on the device: kernels/host/element.h in the arithmetic of a GPU, to the bit.
// Compiled without contraction (-fmad=false) and without flushing subnormals.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/float_formats.h"

namespace moeccl::cuda {

using kernels::Bf16;
using kernels::SmallFloat;

// fp16 has conversions in hardware, with the same results.
struct Half {
#if defined(__CUDACC__)
  static MOECCL_DEVICE float decode(uint32_t bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<unsigned short>(bits)));
    return f;
  }
  static MOECCL_DEVICE uint32_t encode(float value) {
    unsigned short h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(value));
    return h;
  }
#else
  static float decode(uint32_t bits) { return kernels::Fp16::decode(bits); }
  static uint32_t encode(float value) { return kernels::Fp16::encode(value); }
#endif
};

enum class Family { kFloat, kSigned, kUnsigned };

template <class T, Family kF>
struct Native {
  using Stored = T;
  using Acc = T;
  static constexpr Family kFamily = kF;
  static MOECCL_DEVICE Acc load(Stored v) { return v; }
  static MOECCL_DEVICE Stored round(Acc v) { return v; }
};
template <class Format, class Bits>
struct Narrow {
  using Stored = Bits;
  using Acc = float;
  static constexpr Family kFamily = Family::kFloat;
  static MOECCL_DEVICE Acc load(Stored v) { return Format::decode(v); }
  static MOECCL_DEVICE Stored round(Acc v) { return static_cast<Stored>(Format::encode(v)); }
};

using Int8 = Native<int8_t, Family::kSigned>;
using Uint8 = Native<uint8_t, Family::kUnsigned>;
using Int32 = Native<int32_t, Family::kSigned>;
using Uint32 = Native<uint32_t, Family::kUnsigned>;
using Int64 = Native<int64_t, Family::kSigned>;
using Uint64 = Native<uint64_t, Family::kUnsigned>;
using Float16 = Narrow<Half, uint16_t>;
using Float32 = Native<float, Family::kFloat>;
using Float64 = Native<double, Family::kFloat>;
using Bfloat16 = Narrow<Bf16, uint16_t>;
using Float8e4m3 = Narrow<SmallFloat<4, 3, false>, uint8_t>;
using Float8e5m2 = Narrow<SmallFloat<5, 2, true>, uint8_t>;

// The types in the order of moecclDataType_t, for instantiation.
#define MOECCL_FOR_EACH_TYPE(X) \
  X(0, Int8)                    \
  X(1, Uint8)                   \
  X(2, Int32)                   \
  X(3, Uint32)                  \
  X(4, Int64)                   \
  X(5, Uint64)                  \
  X(6, Float16)                 \
  X(7, Float32)                 \
  X(8, Float64)                 \
  X(9, Bfloat16)                \
  X(10, Float8e4m3)             \
  X(11, Float8e5m2)

// Integers wrap, through uint64_t; the order of the tests in max and min is part of the definition.
template <class E>
MOECCL_DEVICE typename E::Acc add(typename E::Acc a, typename E::Acc b) {
  if constexpr (E::kFamily == Family::kFloat)
    return a + b;
  else
    return static_cast<typename E::Acc>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <class E>
MOECCL_DEVICE typename E::Acc multiply(typename E::Acc a, typename E::Acc b) {
  if constexpr (E::kFamily == Family::kFloat)
    return a * b;
  else
    return static_cast<typename E::Acc>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class E>
MOECCL_DEVICE typename E::Acc divide(typename E::Acc a, uint32_t divisor) {
  using Acc = typename E::Acc;
  if constexpr (E::kFamily == Family::kFloat)
    return a / static_cast<Acc>(divisor);
  else if constexpr (E::kFamily == Family::kSigned)
    return static_cast<Acc>(static_cast<int64_t>(a) / static_cast<int64_t>(divisor));
  else
    return static_cast<Acc>(static_cast<uint64_t>(a) / divisor);
}

enum class Op : uint32_t { kSum, kProd, kMax, kMin };
template <class E, Op kOp>
MOECCL_DEVICE typename E::Acc combine(typename E::Acc a, typename E::Acc b) {
  if constexpr (kOp == Op::kSum)
    return add<E>(a, b);
  else if constexpr (kOp == Op::kProd)
    return multiply<E>(a, b);
  else if constexpr (kOp == Op::kMax)
    return a != a ? a : (a > b ? a : b);
  else
    return a != a ? a : (a < b ? a : b);
}

// A double cut to 64 bits: toward zero, clamped, NaN to 0; negative values wrap into unsigned types.
template <class E>
MOECCL_DEVICE typename E::Acc truncate(double v) {
  using Acc = typename E::Acc;
  constexpr double kAbove = E::kFamily == Family::kSigned ? 9223372036854775808.0 : 18446744073709551616.0;
  uint64_t wide;
  if (v != v)
    wide = 0;
  else if (v >= kAbove)
    wide = E::kFamily == Family::kSigned ? 0x7fffffffffffffffull : ~0ull;
  else if (v <= -9223372036854775808.0)
    wide = 0x8000000000000000ull;
  else if (E::kFamily == Family::kSigned || v < 0)
    wide = static_cast<uint64_t>(static_cast<int64_t>(v));
  else
    wide = static_cast<uint64_t>(v);
  return static_cast<Acc>(wide);
}

// weight * v in the arithmetic of rows.
template <class E>
MOECCL_DEVICE typename E::Acc weigh(typename E::Acc v, float weight) {
  if constexpr (E::kFamily == Family::kFloat)
    return static_cast<typename E::Acc>(weight) * v;
  else
    return truncate<E>(static_cast<double>(weight) * static_cast<double>(v));
}

// 16 bytes as elements.
template <class E>
struct Pack {
  static constexpr uint32_t kElements = 16 / sizeof(typename E::Stored);
  union {
    Vec16 vec;
    typename E::Stored element[kElements];
  };
  MOECCL_DEVICE Pack() {}
};

// Buffers carry no promise of alignment, not even to their elements.
template <class T>
MOECCL_DEVICE T load_any(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) == 0) return *static_cast<const T*>(p);
  union {
    T value;
    uint8_t byte[sizeof(T)];
  } u;
  for (uint32_t i = 0; i < sizeof(T); ++i) u.byte[i] = static_cast<const uint8_t*>(p)[i];
  return u.value;
}
template <class T>
MOECCL_DEVICE void store_any(void* p, T v) {
  if (reinterpret_cast<uintptr_t>(p) % sizeof(T) == 0) {
    *static_cast<T*>(p) = v;
    return;
  }
  union {
    T value;
    uint8_t byte[sizeof(T)];
  } u;
  u.value = v;
  for (uint32_t i = 0; i < sizeof(T); ++i) static_cast<uint8_t*>(p)[i] = u.byte[i];
}

MOECCL_DEVICE uint8_t* at(void* p, size_t bytes) { return static_cast<uint8_t*>(p) + bytes; }
MOECCL_DEVICE const uint8_t* at(const void* p, size_t bytes) { return static_cast<const uint8_t*>(p) + bytes; }
MOECCL_DEVICE size_t pick(const uint32_t* index, size_t first, size_t i) { return index ? index[i] : first + i; }
MOECCL_DEVICE bool aligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

}  // namespace moeccl::cuda
