// SPDX-License-Identifier: Apache-2.0
// Rows with arithmetic: weighted copies, weighted sums (combine), products (gradients of weights).
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

inline constexpr int kGroups = 8;       // kernels::kMaxGroups
inline constexpr uint32_t kLanes = 32;  // kernels::kDotLanes

template <class E>
MOECCL_DEVICE void scale_rows(const RowsKernelArgs& a, const Team& team) {
  using Stored = typename E::Stored;
  constexpr uint32_t kN = Pack<E>::kElements;
  const bool packs = aligned16(a.dst) && aligned16(a.src) && a.row_bytes % 16 == 0;
  const size_t unit = packs ? 16 : sizeof(Stored), per_row = a.row_bytes / unit;
  for (size_t i = team.thread; i < a.count * per_row; i += team.n_threads) {
    const size_t row = i / per_row, begin = i % per_row * unit;
    uint8_t* dst = at(a.dst, pick(a.dst_index, a.dst_first, row) * a.row_bytes + begin);
    const uint8_t* src = at(a.src, pick(a.src_index, a.src_first, row) * a.row_bytes + begin);
    const float weight = a.weights[row];
    if (!packs) {
      store_any<Stored>(dst, E::round(weigh(E::load(load_any<Stored>(src)), weight)));
      continue;
    }
    Pack<E> p;
    p.vec = *reinterpret_cast<const Vec16*>(src);
    MOECCL_UNROLL
    for (uint32_t j = 0; j < kN; ++j) p.element[j] = E::round(weigh(E::load(p.element[j]), weight));
    *reinterpret_cast<Vec16*>(dst) = p.vec;
  }
}

// -0 is the identity of float addition, see ColumnSum in kernels/host/reference.cc.
template <class E>
MOECCL_DEVICE typename E::Acc empty_sum() {
  return static_cast<typename E::Acc>(E::kIsFloat ? -0.0 : 0.0);
}

// Sums one column of one row, with the nested groups of deterministic mode.
template <class E>
MOECCL_DEVICE typename E::Stored sum_column(const ReduceRowsKernelArgs& a, uint64_t begin, uint64_t end,
                                            size_t column) {
  using Acc = typename E::Acc;
  using Stored = typename E::Stored;
  Acc group[kGroups];
  MOECCL_UNROLL
  for (int g = 0; g < kGroups; ++g) group[g] = empty_sum<E>();
  for (uint64_t t = begin; t < end; ++t) {
    const RowTermBits term = a.terms[t];
    Acc v = E::load(load_any<Stored>(
        at(a.bases[term.segment], (static_cast<size_t>(term.row) * a.row_elements + column) * sizeof(Stored))));
    if (a.weights) v = weigh(v, a.weights[t]);
    group[kGroups - 1] = add(group[kGroups - 1], v);
    // The last term of a row closes all groups. The loop is unrolled, so that the accumulators stay in registers.
    const int close = !a.grouped ? 0 : t + 1 == end ? kGroups : term.close;
    MOECCL_UNROLL
    for (int g = kGroups - 1; g > 0; --g) {
      if (kGroups - 1 - g >= close) continue;
      group[g - 1] = add(group[g - 1], E::load(E::round(group[g])));
      group[g] = empty_sum<E>();
    }
  }
  return E::round(a.grouped ? group[0] : group[kGroups - 1]);
}

// Sums 16 bytes of a row. Loads of four terms are in flight at once; the sums stay in term order. Integer bytes are
// weighted through doubles, and 16 of those fill the registers with one term.
template <class E>
MOECCL_DEVICE Vec16 sum_pack(const ReduceRowsKernelArgs& a, uint64_t begin, uint64_t end, size_t bytes) {
  using Acc = typename E::Acc;
  constexpr uint32_t kN = Pack<E>::kElements;
  const size_t row_bytes = a.row_elements * sizeof(typename E::Stored);
  Acc acc[kN];
  MOECCL_UNROLL
  for (uint32_t j = 0; j < kN; ++j) acc[j] = empty_sum<E>();
  [[maybe_unused]] constexpr int kTerms = !E::kIsFloat && kN == 16 ? 1 : 4;
  MOECCL_UNROLL_TERMS
  for (uint64_t t = begin; t < end; ++t) {
    const RowTermBits term = a.terms[t];
    Pack<E> p;
    p.vec = *reinterpret_cast<const Vec16*>(at(a.bases[term.segment], term.row * row_bytes + bytes));
    const float weight = a.weights ? a.weights[t] : 0;
    MOECCL_UNROLL
    for (uint32_t j = 0; j < kN; ++j) {
      const Acc v = E::load(p.element[j]);
      acc[j] = add(acc[j], a.weights ? weigh(v, weight) : v);
    }
  }
  Pack<E> out;
  MOECCL_UNROLL
  for (uint32_t j = 0; j < kN; ++j) out.element[j] = E::round(acc[j]);
  return out.vec;
}

template <class E>
MOECCL_DEVICE void reduce_rows(const ReduceRowsKernelArgs& a, const Team& team) {
  using Stored = typename E::Stored;
  const size_t row_bytes = a.row_elements * sizeof(Stored);
  bool packs = !a.grouped && aligned16(a.dst) && row_bytes % 16 == 0;
  for (uint32_t k = 0; k < a.n_bases; ++k) packs = packs && aligned16(a.bases[k]);
  const size_t unit = packs ? 16 : sizeof(Stored), per_row = row_bytes / unit;
  for (size_t i = team.thread; i < a.count * per_row; i += team.n_threads) {
    const size_t row = i / per_row, begin = i % per_row * unit;
    uint8_t* dst = at(a.dst, pick(a.dst_index, a.dst_first, row) * row_bytes + begin);
    const uint64_t first = a.offsets[row], last = a.offsets[row + 1];
    if (packs) {
      // A row without terms is zero, not the identity -0.
      *reinterpret_cast<Vec16*>(dst) = first == last ? Vec16{} : sum_pack<E>(a, first, last, begin);
    } else {
      store_any<Stored>(dst, first == last ? Stored{} : sum_column<E>(a, first, last, i % per_row));
    }
  }
}

// One warp handles each row: lane l sums elements j with j % 32 == l in order, then upper halves are added onto lower
// halves.
template <class E>
MOECCL_DEVICE void dot_rows(const DotRowsKernelArgs& a, const Team& team) {
  using Stored = typename E::Stored;
  using Sum = typename std::conditional<sizeof(typename E::Acc) == 4 && E::kIsFloat, float, double>::type;
  const size_t row_bytes = a.row_elements * sizeof(Stored);
  const size_t rounds = (a.count + team.n_warps() - 1) / team.n_warps();
  for (size_t round = 0; round < rounds; ++round) {
    const size_t row = round * team.n_warps() + team.warp();
    Sum sum = 0;
    if (row < a.count) {
      const uint8_t* x = at(a.a, pick(a.a_index, 0, row) * row_bytes);
      const uint8_t* y = at(a.b, pick(a.b_index, 0, row) * row_bytes);
      for (size_t j = team.lane(); j < a.row_elements; j += kLanes)
        sum += static_cast<Sum>(E::load(load_any<Stored>(x + j * sizeof(Stored)))) *
               static_cast<Sum>(E::load(load_any<Stored>(y + j * sizeof(Stored))));
    }
    for (uint32_t width = kLanes / 2; width > 0; width /= 2) {
      const Sum other = shuffle_xor(sum, width);
      if (team.lane() < width) sum += other;
    }
    if (row < a.count && team.lane() == 0) a.out[row] = static_cast<float>(sum);
  }
}

}  // namespace moeccl::cuda
