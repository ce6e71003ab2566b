// SPDX-License-Identifier: Apache-2.0
// Computes dst = srcs[0] op srcs[1] op ..., element by element and in this order.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

// Returns the scale in the accumulator's type, like kernels::scale_as.
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

// Does the reverse for one element, like kernels::scalar_from.
template <class E>
MOECCL_DEVICE ScalarBits scale_from(const void* element) {
  const typename E::Acc value = E::load(load_any<typename E::Stored>(element));
  ScalarBits s{};
  if constexpr (!E::kIsFloat)
    s.u64 = static_cast<uint64_t>(value);
  else if constexpr (sizeof(value) == 8)
    s.f64 = value;
  else
    s.f32 = value;
  return s;
}

template <class E, Op kOp>
MOECCL_DEVICE void reduce_element(const ReduceKernelArgs& a, size_t i) {
  using Acc = typename E::Acc;
  using Stored = typename E::Stored;
  Acc acc{};
  for (uint32_t k = 0; k < a.n_srcs; ++k) {
    Acc v = E::load(load_any<Stored>(at(a.srcs[k], i * sizeof(Stored))));
    if constexpr (kOp == Op::kSum) {
      if (a.scaled) v = E::load(E::round(multiply(v, scale_as<E>(a.scales[k]))));
    }
    acc = k == 0 ? v : combine<E, kOp>(acc, v);
  }
  if constexpr (kOp == Op::kSum) {
    if (a.divisor > 1) acc = divide(acc, a.divisor);
  }
  store_any<Stored>(at(a.dst, i * sizeof(Stored)), E::round(acc));
}

// Only sums have scales and divisors. Those of integers are rare and slow, so they are applied element by element.
template <class E, Op kOp>
inline constexpr bool kArithmeticInPacks = kOp == Op::kSum&& E::kIsFloat;

template <class E, Op kOp>
MOECCL_DEVICE void store_pack(const ReduceKernelArgs& a, size_t bytes, typename E::Acc* acc) {
  Pack<E> out;
  MOECCL_UNROLL
  for (uint32_t j = 0; j < Pack<E>::kElements; ++j) {
    if constexpr (kArithmeticInPacks<E, kOp>) {
      if (a.divisor > 1) acc[j] = divide(acc[j], a.divisor);
    }
    out.element[j] = E::round(acc[j]);
  }
  *reinterpret_cast<Vec16*>(at(a.dst, bytes)) = out.vec;
}

// Reduces the pack at `bytes` of any number of sources, in any arithmetic.
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
        if (a.scaled) v = E::load(E::round(multiply(v, scale)));
      }
      acc[j] = k == 0 ? v : combine<E, kOp>(acc[j], v);
    }
  }
  store_pack<E, kOp>(a, bytes, acc);
}

// Reduces packs of at most kMost sources without scales. A thread has kPacks packs of every source in flight before it
// adds the first. budget.txt lists the loads in flight; with only one load of each source, memory is idle when few
// multiprocessors work.
template <class E, Op kOp, uint32_t kMost, uint32_t kPacks>
MOECCL_DEVICE void reduce_few(const ReduceKernelArgs& a, size_t head_bytes, size_t n_packs, const Team& team) {
  using Acc = typename E::Acc;
  constexpr uint32_t kN = Pack<E>::kElements;
  for (size_t first = team.thread; first < n_packs; first += kPacks * team.n_threads) {
    Pack<E> in[kPacks][kMost];
    MOECCL_UNROLL
    for (uint32_t p = 0; p < kPacks; ++p) {
      const size_t pack = first + p * team.n_threads;
      MOECCL_UNROLL
      for (uint32_t k = 0; k < kMost; ++k)
        if (k < a.n_srcs && pack < n_packs)
          in[p][k].vec = *reinterpret_cast<const Vec16*>(at(a.srcs[k], head_bytes + pack * 16));
    }
    MOECCL_UNROLL
    for (uint32_t p = 0; p < kPacks; ++p) {
      const size_t pack = first + p * team.n_threads;
      if (pack >= n_packs) break;
      Acc acc[kN];
      MOECCL_UNROLL
      for (uint32_t j = 0; j < kN; ++j) acc[j] = E::load(in[p][0].element[j]);
      MOECCL_UNROLL
      for (uint32_t k = 1; k < kMost; ++k) {
        if (k >= a.n_srcs) break;
        MOECCL_UNROLL
        for (uint32_t j = 0; j < kN; ++j) acc[j] = combine<E, kOp>(acc[j], E::load(in[p][k].element[j]));
      }
      store_pack<E, kOp>(a, head_bytes + pack * 16, acc);
    }
  }
}

template <class E, Op kOp, bool kDeep>
MOECCL_DEVICE void reduce_with(const ReduceKernelArgs& a, const Team& team) {
  constexpr size_t kSize = sizeof(typename E::Stored);
  const uintptr_t misaligned = reinterpret_cast<uintptr_t>(a.dst) % 16;
  bool packs = misaligned % kSize == 0 && (kArithmeticInPacks<E, kOp> || (a.scaled == 0 && a.divisor <= 1));
  for (uint32_t k = 0; k < a.n_srcs; ++k) packs = packs && reinterpret_cast<uintptr_t>(a.srcs[k]) % 16 == misaligned;
  size_t head = a.count, n_packs = 0, n_few = 0;
  if (packs) {
    head = misaligned == 0 ? 0 : (16 - misaligned) / kSize;
    if (head > a.count) head = a.count;
    n_packs = (a.count - head) * kSize / 16;
  }
  for (size_t i = team.thread; i < head; i += team.n_threads) reduce_element<E, kOp>(a, i);
  // Keeps eight loads in flight, or four for two sources of bytes, because each of their packs is a long piece of code.
  // fp8, which sm_80 converts in integers, would be too long. Operations other than sums are too rare to double the
  // image.
  constexpr bool kFew = kDeep && kOp == Op::kSum && (kSize > 1 || !E::kIsFloat);
  if constexpr (kFew) {
    if (a.scaled == 0 && a.n_srcs <= 8) {
      if (a.n_srcs <= 2)
        reduce_few<E, kOp, 2, kSize == 1 ? 2 : 4>(a, head * kSize, n_packs, team);
      else if (a.n_srcs <= 4)
        reduce_few<E, kOp, 4, 2>(a, head * kSize, n_packs, team);
      else
        reduce_few<E, kOp, 8, 1>(a, head * kSize, n_packs, team);
      n_few = n_packs;
    }
  }
  for (size_t i = n_few + team.thread; i < n_packs; i += team.n_threads) reduce_pack<E, kOp>(a, head * kSize + i * 16);
  for (size_t i = head + n_packs * (16 / kSize) + team.thread; i < a.count; i += team.n_threads)
    reduce_element<E, kOp>(a, i);
}

// kDeep keeps many loads in flight when there are few sources. The persistent kernel does not use it, because its own
// state leaves no registers for them: the arrays of reduce_few() went to local memory there (1.4 KB a thread).
template <class E, bool kDeep = false>
MOECCL_DEVICE void reduce(const ReduceKernelArgs& a, const Team& team) {
  switch (static_cast<Op>(a.op)) {
    case Op::kSum:
      reduce_with<E, Op::kSum, kDeep>(a, team);
      break;
    case Op::kProd:
      reduce_with<E, Op::kProd, kDeep>(a, team);
      break;
    case Op::kMax:
      reduce_with<E, Op::kMax, kDeep>(a, team);
      break;
    case Op::kMin:
      reduce_with<E, Op::kMin, kDeep>(a, team);
      break;
  }
}

}  // namespace moeccl::cuda
