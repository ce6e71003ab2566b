// The elements of kernels/element.h as the device names and finds them.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/element.h"

namespace moeccl::cuda {

using kernels::add;
using kernels::Bf16;
using kernels::divide;
using kernels::multiply;
using kernels::Narrow;
using kernels::Native;
using kernels::SmallFloat;
using kernels::weigh;

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

using Int8 = Native<int8_t>;
using Uint8 = Native<uint8_t>;
using Int32 = Native<int32_t>;
using Uint32 = Native<uint32_t>;
using Int64 = Native<int64_t>;
using Uint64 = Native<uint64_t>;
using Float16 = Narrow<Half, uint16_t>;
using Float32 = Native<float>;
using Float64 = Native<double>;
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

enum class Op : uint32_t { kSum, kProd, kMax, kMin };
template <class E, Op kOp>
MOECCL_DEVICE typename E::Acc combine(typename E::Acc a, typename E::Acc b) {
  if constexpr (kOp == Op::kSum)
    return kernels::add(a, b);
  else if constexpr (kOp == Op::kProd)
    return kernels::multiply(a, b);
  else if constexpr (kOp == Op::kMax)
    return kernels::maximum(a, b);
  else
    return kernels::minimum(a, b);
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
