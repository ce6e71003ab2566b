// SPDX-License-Identifier: Apache-2.0
// The overlays' copy, copy_stream and copy_rows.
#pragma once

#include "kernels/host/simd_reduce.h"

namespace moeccl::kernels::simd {

// From 2112 bytes to 1 MiB, glibc copies with `rep movsb` if the processor reports it as fast. On Zen 3 and 4 it is not
// fast when source and destination have different offsets in their cache lines, as buffers of malloc (16 bytes into a
// page) and the staging do: in one core's cache it reaches 42 to 53 instead of 74 to 92 GB/s, and an AllReduce of 2 MiB
// took 540 us instead of 360.
constexpr size_t kOwnCopyFrom = 2 << 10, kOwnCopyUpTo = 1 << 20;

template <class Isa>
void copy(void* dst, const void* src, size_t bytes) {
  using V = typename VecOf<uint64_t, Isa::kBytes>::type;
  constexpr size_t kVectors = 4, kStep = kVectors * sizeof(V);
  if (bytes < kOwnCopyFrom || bytes > kOwnCopyUpTo) {
    if (bytes) std::memcpy(dst, src, bytes);
    return;
  }
  auto* to = static_cast<std::byte*>(dst);
  const auto* from = static_cast<const std::byte*>(src);
  size_t i = (kLineBytes - reinterpret_cast<uintptr_t>(dst) % kLineBytes) % kLineBytes;
  std::memcpy(to, from, i);
  for (; i + kStep <= bytes; i += kStep) {
    V v[kVectors];
    for (size_t u = 0; u < kVectors; ++u) std::memcpy(&v[u], from + i + u * sizeof(V), sizeof(V));
    for (size_t u = 0; u < kVectors; ++u) std::memcpy(to + i + u * sizeof(V), &v[u], sizeof(V));
  }
  std::memcpy(to + i, from + i, bytes - i);
}

// Writes whole lines with non-temporal stores, without the fence. Meanwhile, it prefetches the lines at `next`, which
// will be read soon after, into the second-level cache.
template <class Isa>
inline void stream_bytes(std::byte* dst, const std::byte* src, size_t bytes, const std::byte* next) {
  using V = typename VecOf<uint64_t, Isa::kBytes>::type;
  constexpr size_t kStep = 256;
  const size_t head = (kLineBytes - reinterpret_cast<uintptr_t>(dst) % kLineBytes) % kLineBytes;
  if (bytes < head + kStep) {
    if (bytes) std::memcpy(dst, src, bytes);
    return;
  }
  std::memcpy(dst, src, head);
  size_t i = head;
  for (; i + kStep <= bytes; i += kStep) {
    MOECCL_UNROLL
    for (size_t line = 0; line < kStep; line += kLineBytes) prefetch<Isa>(next, i + line);
    V v[kStep / sizeof(V)];
    std::memcpy(v, src + i, kStep);
    MOECCL_UNROLL
    for (size_t u = 0; u < kStep / sizeof(V); ++u) Isa::stream(dst + i + u * sizeof(V), v[u]);
  }
  if (i < bytes) std::memcpy(dst + i, src + i, bytes - i);
}

// Prefetches a page ahead, where the hardware stops: this gains 1 to 3% at 64 MiB and nothing below.
template <class Isa>
void copy_stream(void* dst, const void* src, size_t bytes) {
  constexpr size_t kPageBytes = 4096;
  const std::byte* from = static_cast<const std::byte*>(src);
  stream_bytes<Isa>(static_cast<std::byte*>(dst), from, bytes, from + kPageBytes);
  Isa::store_fence();
}

// For kHalf <= bytes <= 2 * kHalf: two moves that overlap in the middle.
template <class Isa, size_t kHalf>
inline void copy_overlapped(std::byte* dst, const std::byte* src, size_t bytes) {
  struct Part {
    std::byte bytes[kHalf];
  } first, last;
  std::memcpy(&first, src, kHalf);
  std::memcpy(&last, src + bytes - kHalf, kHalf);
  std::memcpy(dst, &first, kHalf);
  std::memcpy(dst + bytes - kHalf, &last, kHalf);
}

template <class Isa>
inline void copy_byte(std::byte* dst, const std::byte* src, size_t) {
  *dst = *src;
}

template <class Isa>
inline void copy_row(std::byte* dst, const std::byte* src, size_t bytes) {
  copy<Isa>(dst, src, bytes);
}

template <class Isa>
inline size_t dst_row(const CopyRowsArgs& a, size_t i) {
  return a.dst_index ? a.dst_index[i] : a.dst_first + i;
}

template <class Isa>
inline size_t src_row(const CopyRowsArgs& a, size_t i) {
  return a.src_index ? a.src_index[i] : a.src_first + i;
}

template <class Isa, void (*kCopyRow)(std::byte*, const std::byte*, size_t)>
void for_rows(const CopyRowsArgs& a) {
  std::byte* const dst = static_cast<std::byte*>(a.dst);
  const std::byte* const src = static_cast<const std::byte*>(a.src);
  for (size_t i = 0; i < a.count; ++i) {
    kCopyRow(dst + dst_row<Isa>(a, i) * a.row_bytes, src + src_row<Isa>(a, i) * a.row_bytes, a.row_bytes);
  }
}

// The hardware follows a row but cannot guess the next one, so that is prefetched alongside: a gather of rows of 14 KiB
// went from 27 to 43 GB/s (Zen 4, one core).
template <class Isa>
void stream_rows(const CopyRowsArgs& a) {
  // Two rows and other hot data must fit the second-level cache; a longer row is long enough for the hardware.
  constexpr size_t kMostAhead = 128 << 10;
  std::byte* const dst = static_cast<std::byte*>(a.dst);
  const std::byte* const src = static_cast<const std::byte*>(a.src);
  for (size_t i = 0; i < a.count; ++i) {
    const size_t next = i + 1 < a.count && a.row_bytes <= kMostAhead ? i + 1 : i;
    stream_bytes<Isa>(dst + dst_row<Isa>(a, i) * a.row_bytes, src + src_row<Isa>(a, i) * a.row_bytes, a.row_bytes,
                      src + src_row<Isa>(a, next) * a.row_bytes);
  }
  Isa::store_fence();
}

template <class Isa>
void copy_rows(const CopyRowsArgs& a) {
  // Shorter rows are mostly partial lines at their ends, where non-temporal stores are slower.
  constexpr size_t kStreamRowBytes = 1024;
  if (!a.dst_index && !a.src_index) {
    std::byte* dst = static_cast<std::byte*>(a.dst) + a.dst_first * a.row_bytes;
    const std::byte* src = static_cast<const std::byte*>(a.src) + a.src_first * a.row_bytes;
    return (a.stream ? copy_stream<Isa> : copy<Isa>)(dst, src, a.count * a.row_bytes);
  }
  if (a.stream && a.row_bytes >= kStreamRowBytes) return stream_rows<Isa>(a);
  // Calling memcpy costs more than the whole copy of a small row.
  const size_t n = a.row_bytes;
  if (n == 1) return for_rows<Isa, copy_byte<Isa>>(a);
  if (n < 4) return for_rows<Isa, copy_overlapped<Isa, 2>>(a);
  if (n < 8) return for_rows<Isa, copy_overlapped<Isa, 4>>(a);
  if (n <= 16) return for_rows<Isa, copy_overlapped<Isa, 8>>(a);
  if (n <= 32) return for_rows<Isa, copy_overlapped<Isa, 16>>(a);
  if (n <= 64) return for_rows<Isa, copy_overlapped<Isa, 32>>(a);
  return for_rows<Isa, copy_row<Isa>>(a);
}

}  // namespace moeccl::kernels::simd
