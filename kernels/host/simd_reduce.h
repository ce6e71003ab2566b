// SPDX-License-Identifier: Apache-2.0
// The overlays' reduce and scale_copy. Each source is read once, and dst and each copy are written once: a block of
// kUnroll registers runs through all sources before the next block starts.
#pragma once

#include "kernels/host/simd_batch.h"

namespace moeccl::kernels::simd {

inline constexpr size_t kLineBytes = 64;

// Returns the elements before p reaches a cache line, at most `count`, or `count` if p cannot reach one.
template <class B>
inline size_t elements_to_line(const void* p, size_t count) {
  const size_t bytes = (kLineBytes - reinterpret_cast<uintptr_t>(p) % kLineBytes) % kLineBytes;
  if (bytes % sizeof(typename B::Stored)) return count;
  const size_t n = bytes / sizeof(typename B::Stored);
  return n < count ? n : count;
}

// A reduction with its arguments bound. Blocks are named by their first element.
template <class B, ReduceOp kOp>
class Reduction {
  using Acc = typename B::Acc;

 public:
  explicit Reduction(const ReduceArgs& args) : a_(args) {
    if constexpr (requires { B::splat(1.0f); }) {
      if (a_.divisor > 1) divisor_ = B::splat(static_cast<typename B::Lane>(a_.divisor));
    }
  }

  void run() {
    size_t i = 0;
    bool stream = a_.stream;
    if (stream) {
      const size_t head = elements_to_line<B>(a_.dst, a_.count);
      stream = head < a_.count && copies_are_aligned_as_dst();
      if (stream) i = some(0, head);
    }
    if (stream) i = blocks<kStreamUnroll>(i, stream);
    i = blocks<B::kUnroll>(i, stream);
    for (; i + B::kLanes <= a_.count; i += B::kLanes) block<1>(i, stream);
    some(i, a_.count);
  }

 private:
  const std::byte* source(uint32_t k, size_t i) const {
    return static_cast<const std::byte*>(a_.srcs[k]) + i * sizeof(typename B::Stored);
  }
  std::byte* target(size_t i) const { return static_cast<std::byte*>(a_.dst) + i * sizeof(typename B::Stored); }
  std::byte* copy(uint32_t k, size_t i) const {
    return static_cast<std::byte*>(a_.copies[k]) + i * sizeof(typename B::Stored);
  }
  bool copies_are_aligned_as_dst() const {
    const auto place = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % kLineBytes; };
    for (uint32_t k = 0; k < a_.n_copies; ++k)
      if (place(a_.copies[k]) != place(a_.dst)) return false;
    return true;
  }

  // Stores that bypass the cache come in turns of two lines: eight lines at a time cost an AllReduce in the symmetric
  // heap a third of its rate (docs/decisions.md).
  static constexpr size_t kTwoLines = 2 * kLineBytes / sizeof(typename B::Packed);
  static constexpr size_t kStreamUnroll = kTwoLines < B::kUnroll ? kTwoLines : B::kUnroll;

  template <size_t kUnroll>
  size_t blocks(size_t i, bool stream) const {
    for (; i + kUnroll * B::kLanes <= a_.count; i += kUnroll * B::kLanes) block<kUnroll>(i, stream);
    return i;
  }

  template <size_t kUnroll>
  void block(size_t i, bool stream) const {
    Acc acc[kUnroll];
    load_scaled<kUnroll>(acc, 0, i);
    for (uint32_t k = 1; k < a_.n_srcs; ++k) {
      Acc v[kUnroll];
      load_scaled<kUnroll>(v, k, i);
      MOECCL_UNROLL
      for (size_t u = 0; u < kUnroll; ++u) acc[u] = apply<kOp, B>(acc[u], v[u]);
    }
    if (a_.divisor > 1) {
      MOECCL_UNROLL
      for (size_t u = 0; u < kUnroll; ++u) acc[u] = acc[u] / divisor_;
    }
    store_all<B, kUnroll>(target(i), acc, stream);
    for (uint32_t k = 0; k < a_.n_copies; ++k) store_all<B, kUnroll>(copy(k, i), acc, stream);
  }

  template <size_t kUnroll>
  [[gnu::always_inline]] void load_scaled(Acc (&v)[kUnroll], uint32_t k, size_t i) const {
    const std::byte* p = source(k, i);
    load_all<B, kUnroll>(v, p);
    if (kOp == ReduceOp::kSum && a_.scales) {
      const Acc s = B::scale(a_.scales[k]);
      MOECCL_UNROLL
      for (size_t u = 0; u < kUnroll; ++u) v[u] = round<B>(v[u] * s);
    }
  }

  // Reduces elements [begin, end) that do not fill a block, or that bring dst to a line first. Returns end.
  size_t some(size_t begin, size_t end) const {
    for (size_t i = begin; i < end; i += B::kLanes) {
      const size_t n = end - i < B::kLanes ? end - i : B::kLanes;
      Acc acc{};
      for (uint32_t k = 0; k < a_.n_srcs; ++k) {
        Acc v = load_some<B>(source(k, i), n);
        if (kOp == ReduceOp::kSum && a_.scales) v = round<B>(v * B::scale(a_.scales[k]));
        acc = k == 0 ? v : apply<kOp, B>(acc, v);
      }
      if (a_.divisor > 1) acc = acc / divisor_;
      store_some<B>(target(i), acc, n);
      for (uint32_t k = 0; k < a_.n_copies; ++k) store_some<B>(copy(k, i), acc, n);
    }
    return end;
  }

  const ReduceArgs& a_;
  Acc divisor_{};
};

template <class B, ReduceOp kOp>
void reduce(const ReduceArgs& args) {
  // There is no vector instruction for integer division, and an average of integers is rare.
  if constexpr (!requires { B::splat(1.0f); }) {
    if (args.divisor > 1) return reference_table().reduce[B::kType][static_cast<int>(kOp)](args);
  }
  Reduction<B, kOp>(args).run();
  if (args.stream) B::isa::store_fence();
}

template <class B>
void scale_copy(void* dst, const void* src, size_t count, Scalar scale) {
  const ReduceArgs args{.dst = dst, .srcs = &src, .scales = &scale, .count = count, .n_srcs = 1};
  Reduction<B, ReduceOp::kSum>(args).run();
}

}  // namespace moeccl::kernels::simd
