// SPDX-License-Identifier: Apache-2.0
// The elements of kernels/element.h with the names and accesses of the reference kernels. Never include this in an
// overlay (see float_formats.h).
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "kernels/element.h"
#include "kernels/table.h"

namespace moeccl::kernels {

template <int kType>
struct ElementOf;
template <>
struct ElementOf<moecclInt8> : Native<int8_t> {};
template <>
struct ElementOf<moecclUint8> : Native<uint8_t> {};
template <>
struct ElementOf<moecclInt32> : Native<int32_t> {};
template <>
struct ElementOf<moecclUint32> : Native<uint32_t> {};
template <>
struct ElementOf<moecclInt64> : Native<int64_t> {};
template <>
struct ElementOf<moecclUint64> : Native<uint64_t> {};
template <>
struct ElementOf<moecclFloat16> : Narrow<Fp16, uint16_t> {};
template <>
struct ElementOf<moecclFloat32> : Native<float> {};
template <>
struct ElementOf<moecclFloat64> : Native<double> {};
template <>
struct ElementOf<moecclBfloat16> : Narrow<Bf16, uint16_t> {};
template <>
struct ElementOf<moecclFloat8e4m3> : Narrow<Fp8e4m3, uint8_t> {};
template <>
struct ElementOf<moecclFloat8e5m2> : Narrow<Fp8e5m2, uint8_t> {};

// Buffers need not be aligned.
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

}  // namespace moeccl::kernels
