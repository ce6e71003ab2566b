// SPDX-License-Identifier: Apache-2.0
// The elements of kernels/element.h with the names and accesses of the device code.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/element.h"

namespace moeccl::cuda {

using kernels::add;
using kernels::divide;
using kernels::multiply;
using kernels::Narrow;
using kernels::Native;
using kernels::SmallFloat;
using kernels::weigh;

// fp16 and bf16 have conversions in hardware, with the same results except for NaNs: the hardware turns every NaN into
// 0x7fff, but the host keeps the sign. So a comparison of device and host must accept any NaN for any other
// (kernels/float_formats.h). The sums of a GPU need that anyway: they produce one NaN, 0x7fffffff, where a CPU passes
// on an operand's. The emulation does what the hardware does, so that a bitwise comparison fails without a GPU too.
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
  static uint32_t encode(float value) { return value != value ? 0x7fff : kernels::Fp16::encode(value); }
#endif
};

struct BrainHalf {
  static MOECCL_DEVICE float decode(uint32_t bits) { return kernels::Bf16::decode(bits); }
#if defined(__CUDACC__)
  static MOECCL_DEVICE uint32_t encode(float value) {
    unsigned short h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(value));
    return h;
  }
#else
  static uint32_t encode(float value) { return value != value ? 0x7fff : kernels::Bf16::encode(value); }
#endif
};

// fp8 e4m3 has conversions in hardware from sm_89 on (among the images: sm_90 and sm_100), with NaNs as above. They
// take two elements at once, and the second one is unused here. e5m2 has them too, but they saturate where ours
// overflow, and the arithmetic of SmallFloat needs no more registers.
struct E4m3 {
  using Exact = SmallFloat<4, 3, false>;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  static MOECCL_DEVICE float decode(uint32_t bits) {
    float f;
    asm("{\n"
        ".reg .b16 low, high;\n"
        ".reg .b32 both;\n"
        "cvt.rn.f16x2.e4m3x2 both, %1;\n"
        "mov.b32 {low, high}, both;\n"
        "cvt.f32.f16 %0, low;\n"
        "}"
        : "=f"(f)
        : "h"(static_cast<unsigned short>(bits)));
    return f;
  }
  static MOECCL_DEVICE uint32_t encode(float value) {
    unsigned short two;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(value));
    return two;
  }
#elif defined(__CUDACC__)
  static MOECCL_DEVICE float decode(uint32_t bits) { return Exact::decode(bits); }
  static MOECCL_DEVICE uint32_t encode(float value) { return Exact::encode(value); }
#else
  static float decode(uint32_t bits) { return Exact::decode(bits); }
  static uint32_t encode(float value) { return value != value ? 0x7f : Exact::encode(value); }
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
using Bfloat16 = Narrow<BrainHalf, uint16_t>;
using Float8e4m3 = Narrow<E4m3, uint8_t>;
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

// Buffers need not be aligned, not even to their elements.
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
