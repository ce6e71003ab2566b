// Element by element: dst = srcs[0] op srcs[1] op ..., in this order.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

// The scale in the accumulator's type, as kernels::scale_as.
template <class E>
MOECCL_DEVICE typename E::Acc scale_as(const ScalarBits& s) {
  using Acc = typename E::Acc;
  if constexpr (!E::kIsFloat)
    return static_cast<Acc>(s.u64);
  else if constexpr (sizeof(Acc) == 8)
    return s.f64;
  else
    return s.f32;
}

template <class E, Op kOp>
MOECCL_DEVICE void reduce_element(const ReduceKernelArgs& a, size_t i) {
  using Acc = typename E::Acc;
  using Stored = typename E::Stored;
  Acc acc{};
  for (uint32_t k = 0; k < a.n_srcs; ++k) {
    Acc v = E::load(load_any<Stored>(at(a.srcs[k], i * sizeof(Stored))));
    if constexpr (kOp == Op::kSum) {
      if (a.scaled) v = multiply(v, scale_as<E>(a.scales[k]));
    }
    acc = k == 0 ? v : combine<E, kOp>(acc, v);
  }
  if constexpr (kOp == Op::kSum) {
    if (a.divisor > 1) acc = divide(acc, a.divisor);
  }
  store_any<Stored>(at(a.dst, i * sizeof(Stored)), E::round(acc));
}

// Scales and divisors come with sums only; those of integers are rare and slow, and go element by element.
template <class E, Op kOp>
inline constexpr bool kArithmeticInPacks = kOp == Op::kSum&& E::kIsFloat;

template <class E, Op kOp>
MOECCL_DEVICE void reduce_pack(const ReduceKernelArgs& a, size_t bytes) {
  using Acc = typename E::Acc;
  constexpr uint32_t kN = Pack<E>::kElements;
  Acc acc[kN] = {};
  MOECCL_UNROLL4
  for (uint32_t k = 0; k < a.n_srcs; ++k) {
    Pack<E> p;
    p.vec = *reinterpret_cast<const Vec16*>(at(a.srcs[k], bytes));
    [[maybe_unused]] Acc scale{};
    if constexpr (kArithmeticInPacks<E, kOp>) scale = a.scaled ? scale_as<E>(a.scales[k]) : Acc{};
    MOECCL_UNROLL
    for (uint32_t j = 0; j < kN; ++j) {
      Acc v = E::load(p.element[j]);
      if constexpr (kArithmeticInPacks<E, kOp>) {
        if (a.scaled) v = multiply(v, scale);
      }
      acc[j] = k == 0 ? v : combine<E, kOp>(acc[j], v);
    }
  }
  Pack<E> out;
  MOECCL_UNROLL
  for (uint32_t j = 0; j < kN; ++j) {
    if constexpr (kArithmeticInPacks<E, kOp>) {
      if (a.divisor > 1) acc[j] = divide(acc[j], a.divisor);
    }
    out.element[j] = E::round(acc[j]);
  }
  *reinterpret_cast<Vec16*>(at(a.dst, bytes)) = out.vec;
}

template <class E, Op kOp>
MOECCL_DEVICE void reduce_with(const ReduceKernelArgs& a, const Team& team) {
  constexpr size_t kSize = sizeof(typename E::Stored);
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(a.dst) % 16;
  bool packs = misaligned % kSize == 0 && (kArithmeticInPacks<E, kOp> || (a.scaled == 0 && a.divisor <= 1));
  for (uint32_t k = 0; k < a.n_srcs; ++k) packs = packs && reinterpret_cast<uintptr_t>(a.srcs[k]) % 16 == misaligned;
  size_t head = a.count, n_packs = 0;
  if (packs) {
    head = misaligned == 0 ? 0 : (16 - misaligned) / kSize;
    if (head > a.count) head = a.count;
    n_packs = (a.count - head) * kSize / 16;
  }
  for (size_t i = team.thread; i < head; i += team.n_threads) reduce_element<E, kOp>(a, i);
  for (size_t i = team.thread; i < n_packs; i += team.n_threads) reduce_pack<E, kOp>(a, head * kSize + i * 16);
  for (size_t i = head + n_packs * (16 / kSize) + team.thread; i < a.count; i += team.n_threads)
    reduce_element<E, kOp>(a, i);
}

template <class E>
MOECCL_DEVICE void reduce(const ReduceKernelArgs& a, const Team& team) {
  switch (static_cast<Op>(a.op)) {
    case Op::kSum:
      reduce_with<E, Op::kSum>(a, team);
      break;
    case Op::kProd:
      reduce_with<E, Op::kProd>(a, team);
      break;
    case Op::kMax:
      reduce_with<E, Op::kMax>(a, team);
      break;
    case Op::kMin:
      reduce_with<E, Op::kMin>(a, team);
      break;
  }
}

}  // namespace moeccl::cuda
