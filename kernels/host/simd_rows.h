// SPDX-License-Identifier: Apache-2.0
// The overlays' scale_rows, reduce_rows and dot_rows for the float types. The reference handles integer rows.
#pragma once

#include "kernels/host/simd_reduce.h"

namespace moeccl::kernels::simd {

template <class B>
void scale_rows(const ScaleRowsArgs& a) {
  const CopyRowsArgs& rows = a.rows;
  for (size_t i = 0; i < rows.count; ++i) {
    const size_t to = rows.dst_index ? rows.dst_index[i] : rows.dst_first + i;
    const size_t from = rows.src_index ? rows.src_index[i] : rows.src_first + i;
    const void* src = static_cast<const std::byte*>(rows.src) + from * rows.row_bytes;
    Scalar weight{};
    if constexpr (sizeof(typename B::Lane) == sizeof(double))
      weight.f64 = static_cast<double>(a.weights[i]);
    else
      weight.f32 = a.weights[i];
    const ReduceArgs row{.dst = static_cast<std::byte*>(rows.dst) + to * rows.row_bytes,
                         .srcs = &src,
                         .scales = &weight,
                         .count = rows.row_bytes / sizeof(typename B::Stored),
                         .n_srcs = 1,
                         .stream = rows.stream};
    Reduction<B, ReduceOp::kSum>(row).run();
  }
  if (rows.stream) B::isa::store_fence();
}

// Makes one output row: a block of columns runs through all terms with its sums in registers, then the next block does.
template <class B>
class RowSum {
  using Acc = typename B::Acc;
  using Lane = typename B::Lane;
  static constexpr int kInner = kMaxGroups - 1;
  // A block has 4 registers of sums. With 8 and prefetch, 1024 rows of bf16 top-8 fell from 27 to 14 GB/s (AVX-512).
  static constexpr size_t kMostUnroll = 4 * B::isa::kBytes / sizeof(Acc);
  static constexpr size_t kUnroll = B::kUnroll < kMostUnroll ? B::kUnroll : kMostUnroll;

 public:
  RowSum(const ReduceRowsArgs& args, size_t i)
      : a_(args),
        begin_(args.offsets[i]),
        end_(args.offsets[i + 1]),
        last_(args.offsets[args.count]),
        row_bytes_(args.row_elements * sizeof(typename B::Stored)) {
    const size_t row = args.dst_index ? args.dst_index[i] : args.dst_first + i;
    dst_ = static_cast<std::byte*>(args.dst) + row * row_bytes_;
  }

  void run() {
    if (begin_ == end_) {
      std::memset(dst_, 0, row_bytes_);
      return;
    }
    const size_t n = a_.row_elements;
    size_t j = 0;
    bool stream = a_.stream;
    if (stream) {
      const size_t head = elements_to_line<B>(dst_, n);
      stream = head < n;
      if (stream) j = some(0, head);
    }
    for (; j + kUnroll * B::kLanes <= n; j += kUnroll * B::kLanes) block<kUnroll>(j, B::kLanes, stream);
    for (; j + B::kLanes <= n; j += B::kLanes) block<1>(j, B::kLanes, stream);
    some(j, n);
  }

 private:
  size_t some(size_t begin, size_t end) {
    for (size_t j = begin; j < end; j += B::kLanes) block<1>(j, end - j < B::kLanes ? end - j : B::kLanes, false);
    return end;
  }

  const std::byte* source(uint64_t t, size_t j) const {
    const RowTerm& term = a_.terms[t];
    return static_cast<const std::byte*>(a_.bases[term.segment]) + term.row * row_bytes_ +
           j * sizeof(typename B::Stored);
  }

  // Prefetches the same columns of a term of the next output row, which the hardware cannot guess.
  template <size_t kBatches>
  void load_term(Acc (&v)[kBatches], uint64_t t, size_t j, size_t lanes) const {
    const std::byte* p = source(t, j);
    const uint64_t ahead = t + (end_ - begin_);
    if (kBatches > 1 && ahead < last_) {
      constexpr size_t kBlockBytes = kBatches * sizeof(typename B::Packed);
      const std::byte* next = source(ahead, j);
      for (size_t line = 0; line < kBlockBytes; line += kLineBytes) prefetch<typename B::isa>(next, line);
    }
    if (kBatches == 1 && lanes < B::kLanes)
      v[0] = load_some<B>(p, lanes);
    else
      load_all<B, kBatches>(v, p);
    if (a_.weights) {
      const Acc w = B::splat(static_cast<Lane>(a_.weights[t]));
      MOECCL_UNROLL
      for (size_t u = 0; u < kBatches; ++u) v[u] = w * v[u];
    }
  }

  // lanes < kLanes is used only with kBatches 1, for the last columns of the row.
  template <size_t kBatches>
  void block(size_t j, size_t lanes, bool stream) const {
    Acc sum[kBatches];
    if (a_.grouped)
      sum_grouped<kBatches>(sum, j, lanes);
    else
      sum_plain<kBatches>(sum, j, lanes);
    std::byte* p = dst_ + j * sizeof(typename B::Stored);
    if (kBatches == 1 && lanes < B::kLanes)
      store_some<B>(p, sum[0], lanes);
    else
      store_all<B, kBatches>(p, sum, stream);
  }

  // Starting from the first term equals starting from the reference's -0.
  template <size_t kBatches>
  void sum_plain(Acc (&sum)[kBatches], size_t j, size_t lanes) const {
    load_term<kBatches>(sum, begin_, j, lanes);
    for (uint64_t t = begin_ + 1; t < end_; ++t) {
      Acc v[kBatches];
      load_term<kBatches>(v, t, j, lanes);
      MOECCL_UNROLL
      for (size_t u = 0; u < kBatches; ++u) sum[u] = sum[u] + v[u];
    }
  }

  // The nonempty accumulators, outermost first. A sum that passes through groups of one only changes its level:
  // rounding is idempotent, so the reference's roundings on the way need not be repeated.
  template <size_t kBatches>
  struct OpenGroups {
    Acc sums[kMaxGroups][kBatches];
    int levels[kMaxGroups];
    int n = 0;

    void add_term(const Acc (&v)[kBatches]) {
      if (n > 0 && levels[n - 1] == kInner) {
        MOECCL_UNROLL
        for (size_t u = 0; u < kBatches; ++u) sums[n - 1][u] = sums[n - 1][u] + v[u];
      } else {
        MOECCL_UNROLL
        for (size_t u = 0; u < kBatches; ++u) sums[n][u] = v[u];
        levels[n++] = kInner;
      }
    }

    // Ends all groups inside `level`.
    void close_to(int level) {
      while (n > 0 && levels[n - 1] > level) {
        Acc(&inner)[kBatches] = sums[n - 1];
        const int outer_level = n > 1 ? levels[n - 2] : 0;
        if (n > 1 && outer_level >= level) {
          MOECCL_UNROLL
          for (size_t u = 0; u < kBatches; ++u) sums[n - 2][u] = sums[n - 2][u] + round<B>(inner[u]);
          --n;
        } else {
          MOECCL_UNROLL
          for (size_t u = 0; u < kBatches; ++u) inner[u] = round<B>(inner[u]);
          levels[n - 1] = level;
        }
      }
    }
  };

  template <size_t kBatches>
  void sum_grouped(Acc (&sum)[kBatches], size_t j, size_t lanes) const {
    OpenGroups<kBatches> open;
    for (uint64_t t = begin_; t < end_; ++t) {
      Acc v[kBatches];
      load_term<kBatches>(v, t, j, lanes);
      open.add_term(v);
      const int n_closed = a_.terms[t].close;
      if (n_closed > 0) open.close_to(n_closed < kInner ? kInner - n_closed : 0);
    }
    open.close_to(open.levels[0]);
    MOECCL_UNROLL
    for (size_t u = 0; u < kBatches; ++u) sum[u] = open.sums[0][u];
  }

  const ReduceRowsArgs& a_;
  const uint64_t begin_, end_, last_;
  const size_t row_bytes_;
  std::byte* dst_;
};

template <class B>
void reduce_rows(const ReduceRowsArgs& a) {
  for (size_t i = 0; i < a.count; ++i) RowSum<B>(a, i).run();
  if (a.stream) B::isa::store_fence();
}

template <class B>
void dot_rows(const DotRowsArgs& a) {
  using Lane = typename B::Lane;
  constexpr size_t kAccs = kDotLanes / B::kLanes;
  constexpr size_t kPackedBytes = sizeof(typename B::Packed);
  const size_t row_bytes = a.row_elements * sizeof(typename B::Stored);
  for (size_t i = 0; i < a.count; ++i) {
    const std::byte* x = static_cast<const std::byte*>(a.a) + (a.a_index ? a.a_index[i] : i) * row_bytes;
    const std::byte* y = static_cast<const std::byte*>(a.b) + (a.b_index ? a.b_index[i] : i) * row_bytes;
    // The hardware cannot guess the next rows. Behind the last ones, the prefetches do nothing of use and no harm.
    const size_t next = i + 1 < a.count ? i + 1 : i;
    const std::byte* next_x = static_cast<const std::byte*>(a.a) + (a.a_index ? a.a_index[next] : next) * row_bytes;
    const std::byte* next_y = static_cast<const std::byte*>(a.b) + (a.b_index ? a.b_index[next] : next) * row_bytes;
    typename B::Acc acc[kAccs] = {};
    size_t j = 0;
    for (; j + kDotLanes <= a.row_elements; j += kDotLanes, x += kAccs * kPackedBytes, y += kAccs * kPackedBytes,
                                            next_x += kAccs * kPackedBytes, next_y += kAccs * kPackedBytes) {
      for (size_t line = 0; line < kAccs * kPackedBytes; line += kLineBytes) {
        prefetch<typename B::isa>(next_x, line);
        prefetch<typename B::isa>(next_y, line);
      }
      MOECCL_UNROLL
      for (size_t u = 0; u < kAccs; ++u)
        acc[u] = acc[u] + load<B>(x + u * kPackedBytes) * load<B>(y + u * kPackedBytes);
    }
    // The padding of the last registers adds +0 to lanes that are never -0, so it changes nothing.
    MOECCL_UNROLL
    for (size_t u = 0; u < kAccs; ++u, j += B::kLanes, x += kPackedBytes, y += kPackedBytes) {
      if (j >= a.row_elements) continue;
      const size_t n = a.row_elements - j < B::kLanes ? a.row_elements - j : B::kLanes;
      acc[u] = acc[u] + load_some<B>(x, n) * load_some<B>(y, n);
    }
    Lane lanes[kDotLanes];
    MOECCL_UNROLL
    for (size_t u = 0; u < kAccs; ++u) B::to_lanes(lanes + u * B::kLanes, acc[u]);
    for (size_t width = kDotLanes / 2; width > 0; width /= 2) {
      for (size_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
    }
    a.out[i] = static_cast<float>(lanes[0]);
  }
}

}  // namespace moeccl::kernels::simd
