// SPDX-License-Identifier: Apache-2.0
// The overlays' scan of the codec. As in simd_batch.h, Isa makes everything local to the overlay, and no inline
// function of the standard library is called.
//
// An Isa supplies F and U32 (registers of floats and of their bits), load_fp32 and load_bf16 (both load floats in order
// from memory), at_least (returns a bit for each element whose bits reach the threshold; neither has its sign bit set)
// and collect.
#pragma once

#include <cstring>

#include "kernels/host/codec_tables.h"
#include "kernels/host/simd_batch.h"

namespace moeccl::kernels::simd {

template <class Isa>
struct ScanFp32 {
  static constexpr size_t kElementBytes = 4;
  static typename Isa::F load(const char* p) { return Isa::load_fp32(p); }
  static float one(const char* p) {
    float f;
    std::memcpy(&f, p, sizeof(f));
    return f;
  }
};

template <class Isa>
struct ScanBf16 {
  static constexpr size_t kElementBytes = 2;
  static typename Isa::F load(const char* p) { return Isa::load_bf16(p); }
  static float one(const char* p) {
    uint16_t half;
    std::memcpy(&half, p, sizeof(half));
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof(f));
    return f;
  }
};

// Isa's collect for instructions that cannot pack a register: takes the elements of the mask one by one.
template <class Isa>
inline uint32_t collect_each(uint32_t mask, uint32_t first, typename Isa::F d, uint32_t* index, float* residual) {
  uint32_t n = 0;
  for (; mask != 0; mask &= mask - 1) {
    const auto at = static_cast<uint32_t>(__builtin_ctz(mask));
    index[n] = first + at;
    residual[n++] = d[at];
  }
  return n;
}

template <class Isa, class Type>
uint32_t scan(const CodecScan& s) {
  using F = typename Isa::F;
  using U32 = typename Isa::U32;
  constexpr uint32_t kWidth = sizeof(F) / sizeof(float), kRegisters = kCodecLanes / kWidth;
  const char* expert = static_cast<const char*>(s.expert);
  const char* shared = static_cast<const char*>(s.shared);
  F residual_squares[kRegisters], expert_squares[kRegisters];
  std::memcpy(residual_squares, s.residual_squares, sizeof(residual_squares));
  std::memcpy(expert_squares, s.expert_squares, sizeof(expert_squares));
  const U32 threshold = U32{} + s.threshold;
  // These are copies, so that no store of a candidate can change them.
  uint32_t* const index = s.index;
  float* const residual = s.residual;
  const uint32_t count = s.count;
  uint32_t n = 0, i = 0;
  for (; i + kCodecLanes <= count; i += kCodecLanes) {
    MOECCL_UNROLL
    for (uint32_t r = 0; r < kRegisters; ++r) {
      const uint32_t first = i + r * kWidth;
      const F e = Type::load(expert + first * Type::kElementBytes);
      const F d = e - Type::load(shared + first * Type::kElementBytes);
      residual_squares[r] += d * d;
      expert_squares[r] += e * e;
      U32 bits;
      std::memcpy(&bits, &d, sizeof(bits));
      n += Isa::collect(Isa::at_least(bits & 0x7fffffffu, threshold), first, d, index + n, residual + n);
    }
  }
  std::memcpy(s.residual_squares, residual_squares, sizeof(residual_squares));
  std::memcpy(s.expert_squares, expert_squares, sizeof(expert_squares));
  for (; i < s.count; ++i) {
    const float e = Type::one(expert + i * Type::kElementBytes), d = e - Type::one(shared + i * Type::kElementBytes);
    s.residual_squares[i % kCodecLanes] += d * d;
    s.expert_squares[i % kCodecLanes] += e * e;
    uint32_t bits;
    std::memcpy(&bits, &d, sizeof(bits));
    if ((bits & 0x7fffffffu) < s.threshold) continue;
    s.index[n] = i;
    s.residual[n++] = d;
  }
  return n;
}

template <class Isa>
constexpr CodecTable make_codec(const char* name) {
  return {name, scan<Isa, ScanFp32<Isa>>, scan<Isa, ScanBf16<Isa>>};
}

}  // namespace moeccl::kernels::simd
