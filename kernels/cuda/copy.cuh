// SPDX-License-Identifier: Apache-2.0
// Copies bytes: spans and rows.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

// Each thread has four loads in flight before the first store.
template <class V>
MOECCL_DEVICE void copy_units(V* dst, const V* src, size_t n, size_t first, size_t stride) {
  size_t i = first;
  for (; i + 3 * stride < n; i += 4 * stride) {
    const V a = src[i], b = src[i + stride], c = src[i + 2 * stride], d = src[i + 3 * stride];
    dst[i] = a;
    dst[i + stride] = b;
    dst[i + 2 * stride] = c;
    dst[i + 3 * stride] = d;
  }
  for (; i < n; i += stride) dst[i] = src[i];
}

// Copies the bytes up to the first aligned unit, the units, and the rest. Both sides must have the same alignment.
template <class V>
MOECCL_DEVICE void copy_aligned(uint8_t* dst, const uint8_t* src, size_t bytes, size_t thread, size_t n_threads) {
  const size_t misaligned = reinterpret_cast<uintptr_t>(dst) % sizeof(V);
  size_t head = misaligned == 0 ? 0 : sizeof(V) - misaligned;
  if (head > bytes) head = bytes;
  const size_t units = (bytes - head) / sizeof(V), tail = head + units * sizeof(V);
  for (size_t i = thread; i < head; i += n_threads) dst[i] = src[i];
  copy_units(reinterpret_cast<V*>(dst + head), reinterpret_cast<const V*>(src + head), units, thread, n_threads);
  for (size_t i = tail + thread; i < bytes; i += n_threads) dst[i] = src[i];
}

MOECCL_DEVICE void copy_span(void* dst, const void* src, size_t bytes, size_t thread, size_t n_threads) {
  auto* d = static_cast<uint8_t*>(dst);
  const auto* s = static_cast<const uint8_t*>(src);
  const uintptr_t apart = reinterpret_cast<uintptr_t>(d) ^ reinterpret_cast<uintptr_t>(s);
  if (apart % 16 == 0)
    copy_aligned<Vec16>(d, s, bytes, thread, n_threads);
  else if (apart % 8 == 0)
    copy_aligned<uint64_t>(d, s, bytes, thread, n_threads);
  else if (apart % 4 == 0)
    copy_aligned<uint32_t>(d, s, bytes, thread, n_threads);
  else if (apart % 2 == 0)
    copy_aligned<uint16_t>(d, s, bytes, thread, n_threads);
  else
    copy_aligned<uint8_t>(d, s, bytes, thread, n_threads);
}

// Calls body(row, piece) for the share of the `lanes` threads around this one: neighbouring pieces, so that they read a
// row's indices once, and later from the cache.
template <class Body>
MOECCL_DEVICE void for_each_in_share(const Team& team, uint32_t lanes, size_t rows, size_t pieces, Body&& body) {
  const size_t n = rows * pieces, self = team.thread / lanes, all = team.n_threads / lanes;
  size_t i = n * self / all, row = i / pieces, piece = i % pieces;
  for (const size_t end = n * (self + 1) / all; i < end; ++i) {
    body(row, piece);
    if (++piece == pieces) piece = 0, ++row;
  }
}

// Rows from this size on are cut into pieces for a warp: 4096 bytes are two rounds of four 16-byte loads in each lane.
inline constexpr size_t kWideRow = 512, kRowPiece = 4096;

template <class V>
MOECCL_DEVICE void copy_narrow_rows(const RowsKernelArgs& a, const Team& team) {
  const size_t per_row = a.row_bytes / sizeof(V);
  for (size_t i = team.thread; i < a.count * per_row; i += team.n_threads) {
    const size_t row = i / per_row, unit = i % per_row;
    reinterpret_cast<V*>(at(a.dst, pick(a.dst_index, a.dst_first, row) * a.row_bytes))[unit] =
        reinterpret_cast<const V*>(at(a.src, pick(a.src_index, a.src_first, row) * a.row_bytes))[unit];
  }
}

MOECCL_DEVICE void copy_rows(const RowsKernelArgs& a, const Team& team) {
  if (a.row_bytes < kWideRow) {
    const uintptr_t any = reinterpret_cast<uintptr_t>(a.dst) | reinterpret_cast<uintptr_t>(a.src) | a.row_bytes;
    if (any % 16 == 0)
      copy_narrow_rows<Vec16>(a, team);
    else if (any % 4 == 0)
      copy_narrow_rows<uint32_t>(a, team);
    else
      copy_narrow_rows<uint8_t>(a, team);
    return;
  }
  const size_t pieces = (a.row_bytes + kRowPiece - 1) / kRowPiece;
  for_each_in_share(team, kWarp, a.count, pieces, [&](size_t row, size_t piece) {
    const size_t begin = piece * kRowPiece;
    const size_t bytes = a.row_bytes - begin < kRowPiece ? a.row_bytes - begin : kRowPiece;
    copy_span(at(a.dst, pick(a.dst_index, a.dst_first, row) * a.row_bytes + begin),
              at(a.src, pick(a.src_index, a.src_first, row) * a.row_bytes + begin), bytes, team.lane(), kWarp);
  });
}

}  // namespace moeccl::cuda
