// SPDX-License-Identifier: Apache-2.0
// The definition of every kernel, one element at a time. Overlays must produce the same bits (but any NaN will do).
#include <atomic>
#include <cstring>

#include "kernels/host/element.h"
#include "kernels/host/tables.h"

namespace moeccl::kernels {
namespace {

std::byte* at(void* base, size_t bytes) { return static_cast<std::byte*>(base) + bytes; }
const std::byte* at(const void* base, size_t bytes) { return static_cast<const std::byte*>(base) + bytes; }
size_t pick(const uint32_t* index, size_t first, size_t i) { return index ? index[i] : first + i; }

void copy(void* dst, const void* src, size_t bytes) {
  if (bytes) std::memcpy(dst, src, bytes);
}

void copy_stream(void* dst, const void* src, size_t bytes) {
  copy(dst, src, bytes);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

void copy_rows(const CopyRowsArgs& a) {
  for (size_t i = 0; i < a.count; ++i) {
    std::memcpy(at(a.dst, pick(a.dst_index, a.dst_first, i) * a.row_bytes),
                at(a.src, pick(a.src_index, a.src_first, i) * a.row_bytes), a.row_bytes);
  }
}

template <class E, ReduceOp kOp>
void reduce(const ReduceArgs& a) {
  using Acc = typename E::Acc;
  for (size_t i = 0; i < a.count; ++i) {
    Acc acc{};
    for (uint32_t k = 0; k < a.n_srcs; ++k) {
      Acc v = load_at<E>(a.srcs[k], i);
      if (a.scales) v = E::load(E::round(multiply(v, scale_as<Acc>(a.scales[k]))));
      acc = k == 0 ? v : apply<kOp>(acc, v);
    }
    if (a.divisor > 1) acc = divide(acc, a.divisor);
    store_at<E>(a.dst, i, E::round(acc));
    for (uint32_t k = 0; k < a.n_copies; ++k) store_at<E>(a.copies[k], i, E::round(acc));
  }
}

template <class E>
void scale_copy(void* dst, const void* src, size_t count, Scalar scale) {
  reduce<E, ReduceOp::kSum>({.dst = dst, .srcs = &src, .scales = &scale, .count = count, .n_srcs = 1});
}

template <class E>
void scale_rows(const ScaleRowsArgs& a) {
  const CopyRowsArgs& rows = a.rows;
  const size_t n = rows.row_bytes / sizeof(typename E::Stored);
  for (size_t i = 0; i < rows.count; ++i) {
    std::byte* dst = at(rows.dst, pick(rows.dst_index, rows.dst_first, i) * rows.row_bytes);
    const std::byte* src = at(rows.src, pick(rows.src_index, rows.src_first, i) * rows.row_bytes);
    for (size_t j = 0; j < n; ++j) store_at<E>(dst, j, E::round(weigh(load_at<E>(src, j), a.weights[i])));
  }
}

// The sum of one column. -0 is the identity of float addition (+0 would turn a lone -0 into +0), so adding an empty
// accumulator never changes a value.
template <class E>
struct ColumnSum {
  // Sums that wrap at the type's width equal wider sums truncated at the end, so integers need no wider accumulator.
  using Acc = typename E::Acc;
  static constexpr Acc kEmpty = static_cast<Acc>(E::kIsFloat ? -0.0 : 0);
  Acc groups[kMaxGroups];

  ColumnSum() {
    for (Acc& g : groups) g = kEmpty;
  }
  void add_term(Acc v) { groups[kMaxGroups - 1] = add(groups[kMaxGroups - 1], v); }
  void close(int n_groups) {
    for (int g = kMaxGroups - 1; g > 0 && n_groups > 0; --g, --n_groups) {
      groups[g - 1] = add(groups[g - 1], E::load(E::round(groups[g])));
      groups[g] = kEmpty;
    }
  }
};

template <class E>
typename E::Stored sum_column(const ReduceRowsArgs& a, uint64_t begin, uint64_t end, size_t column) {
  ColumnSum<E> sum;
  for (uint64_t t = begin; t < end; ++t) {
    const RowTerm& term = a.terms[t];
    typename E::Acc v = load_at<E>(a.bases[term.segment], term.row * a.row_elements + column);
    if (a.weights) v = weigh(v, a.weights[t]);
    sum.add_term(v);
    if (a.grouped) sum.close(term.close);
  }
  if (!a.grouped) return E::round(sum.groups[kMaxGroups - 1]);
  sum.close(kMaxGroups);
  return E::round(sum.groups[0]);
}

template <class E>
void reduce_rows(const ReduceRowsArgs& a) {
  using Stored = typename E::Stored;
  for (size_t i = 0; i < a.count; ++i) {
    void* dst = at(a.dst, pick(a.dst_index, a.dst_first, i) * a.row_elements * sizeof(Stored));
    const uint64_t begin = a.offsets[i], end = a.offsets[i + 1];
    for (size_t j = 0; j < a.row_elements; ++j) {
      store_at<E>(dst, j, begin == end ? Stored{} : sum_column<E>(a, begin, end, j));
    }
  }
}

// Element j goes to lane j % kDotLanes. The lanes are then added pairwise, upper half onto lower half. Integers are
// multiplied and summed as doubles.
template <class E>
void dot_rows(const DotRowsArgs& a) {
  using Sum = std::conditional_t<std::is_same_v<typename E::Acc, float>, float, double>;
  const size_t row_bytes = a.row_elements * sizeof(typename E::Stored);
  for (size_t i = 0; i < a.count; ++i) {
    const std::byte* x = at(a.a, pick(a.a_index, 0, i) * row_bytes);
    const std::byte* y = at(a.b, pick(a.b_index, 0, i) * row_bytes);
    Sum lanes[kDotLanes] = {};
    for (size_t j = 0; j < a.row_elements; ++j) {
      lanes[j % kDotLanes] += static_cast<Sum>(load_at<E>(x, j)) * static_cast<Sum>(load_at<E>(y, j));
    }
    for (size_t width = kDotLanes / 2; width > 0; width /= 2) {
      for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    a.out[i] = static_cast<float>(lanes[0]);
  }
}

template <int kType = 0>
void fill(KernelTable& t) {
  if constexpr (kType < MOECCL_NUM_DATA_TYPES) {
    using E = ElementOf<kType>;
    t.scale_copy[kType] = scale_copy<E>;
    t.reduce[kType][static_cast<int>(ReduceOp::kSum)] = reduce<E, ReduceOp::kSum>;
    t.reduce[kType][static_cast<int>(ReduceOp::kProd)] = reduce<E, ReduceOp::kProd>;
    t.reduce[kType][static_cast<int>(ReduceOp::kMax)] = reduce<E, ReduceOp::kMax>;
    t.reduce[kType][static_cast<int>(ReduceOp::kMin)] = reduce<E, ReduceOp::kMin>;
    t.scale_rows[kType] = scale_rows<E>;
    t.reduce_rows[kType] = reduce_rows<E>;
    t.dot_rows[kType] = dot_rows<E>;
    fill<kType + 1>(t);
  }
}

KernelTable make_table() {
  KernelTable t{};
  t.name = "reference";
  t.copy = copy;
  t.copy_stream = copy_stream;
  t.copy_rows = copy_rows;
  t.reduces_to_many = true;
  fill(t);
  return t;
}

}  // namespace

const KernelTable& reference_table() {
  static const KernelTable table = make_table();
  return table;
}

}  // namespace moeccl::kernels
