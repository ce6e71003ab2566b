// Top-k residual coding and its inverse; what they compute is said in args.h. One block for each segment.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/element.cuh"

namespace moeccl::cuda {

// How many threads before this one have v, in thread order; *total: in the whole block. `warps` is shared, [8].
MOECCL_DEVICE uint32_t block_rank(bool v, uint32_t* warps, uint32_t* total) {
  const uint32_t lane = thread_index() % kWarp, warp = thread_index() / kWarp, votes = ballot(v);
  block_sync();  // the last round's counts have been read
  if (lane == 0) warps[warp] = count_bits(votes);
  block_sync();
  uint32_t before = 0;
  *total = 0;
  for (uint32_t w = 0; w < block_threads() / kWarp; ++w) {
    if (w == warp) before = *total;
    *total += warps[w];
  }
  return before + count_bits(votes & ((1u << lane) - 1));
}

template <class E>
MOECCL_DEVICE float residual(const EncodeKernelArgs& a, size_t i) {
  using Stored = typename E::Stored;
  float r = E::load(load_any<Stored>(at(a.in, i * sizeof(Stored))));
  if (a.base) r = r - E::load(load_any<Stored>(at(a.base, i * sizeof(Stored))));
  return a.carry ? r + a.carry[i] : r;
}
// Larger for larger magnitudes; all NaNs alike, before everything.
MOECCL_DEVICE uint32_t magnitude_key(float r) {
  const uint32_t bits = float_to_bits(r) & 0x7fffffffu;
  return bits > 0x7f800000u ? 0x7f800001u : bits;
}

// The keep-th largest key of a segment, digit by digit from the top; *ties: how many that are equal to it are kept.
template <class E>
MOECCL_DEVICE uint32_t threshold(const EncodeKernelArgs& a, size_t first, uint32_t* ties) {
  MOECCL_SHARED uint32_t histogram[256];
  MOECCL_SHARED uint32_t digit, left;
  uint32_t prefix = 0, mask = 0, need = a.keep;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (uint32_t b = thread_index(); b < 256; b += block_threads()) histogram[b] = 0;
    block_sync();
    for (size_t j = thread_index(); j < a.length; j += block_threads()) {
      const uint32_t key = magnitude_key(residual<E>(a, first + j));
      if ((key & mask) == prefix) atomic_add(&histogram[(key >> shift) & 255], 1);
    }
    block_sync();
    if (thread_index() == 0) {
      uint32_t b = 255;
      left = need;
      for (; b > 0 && histogram[b] < left; --b) left -= histogram[b];
      digit = b;
    }
    block_sync();
    prefix |= digit << shift;
    mask |= 255u << shift;
    need = left;
  }
  *ties = need;
  return prefix;
}

template <class E>
MOECCL_DEVICE void encode_segment(const EncodeKernelArgs& a, size_t segment) {
  using Stored = typename E::Stored;
  MOECCL_SHARED uint32_t warps[kBlockThreads / kWarp];
  const size_t first = segment * a.length;
  uint32_t ties = 0, ties_before = 0, sent_before = 0;
  const uint32_t least = threshold<E>(a, first, &ties);
  const size_t rounds = (a.length + block_threads() - 1) / block_threads();
  for (size_t round = 0; round < rounds; ++round) {
    const size_t j = round * block_threads() + thread_index();
    const bool here = j < a.length;
    const float r = here ? residual<E>(a, first + j) : 0;
    const uint32_t key = magnitude_key(r);
    uint32_t total = 0;
    const bool tie = here && key == least;
    const uint32_t tie_rank = ties_before + block_rank(tie, warps, &total);
    ties_before += total;
    const bool send = here && (key > least || (tie && tie_rank < ties));
    const size_t to = segment * a.keep + sent_before + block_rank(send, warps, &total);
    sent_before += total;
    if (!here) continue;  // after the last barrier of the round
    const Stored coded = E::round(r);
    if (send) {
      a.index[to] = static_cast<uint32_t>(j);
      store_any<Stored>(at(a.value, to * sizeof(Stored)), coded);
    }
    if (a.carry) a.carry[first + j] = send ? r - E::load(coded) : r;
  }
}

template <class E>
MOECCL_DEVICE void encode(const EncodeKernelArgs& a) {
  for (size_t s = block_index(); s < a.n_segments; s += grid_blocks()) {
    block_sync();
    encode_segment<E>(a, s);
  }
}

template <class E>
MOECCL_DEVICE void decode_add(const DecodeKernelArgs& a) {
  using Stored = typename E::Stored;
  for (size_t s = block_index(); s < a.n_segments; s += grid_blocks()) {
    uint8_t* out = at(a.out, s * a.length * sizeof(Stored));
    const uint8_t* base = at(a.base, s * a.length * sizeof(Stored));
    if (out != base) {
      for (size_t j = thread_index(); j < a.length; j += block_threads())
        store_any<Stored>(out + j * sizeof(Stored), load_any<Stored>(base + j * sizeof(Stored)));
    }
    block_sync();
    for (size_t i = thread_index(); i < a.keep; i += block_threads()) {
      const size_t j = a.index[s * a.keep + i];
      if (j >= a.length) continue;  // the index came from another rank
      const float v = E::load(load_any<Stored>(at(a.value, (s * a.keep + i) * sizeof(Stored))));
      const float sum = E::load(load_any<Stored>(base + j * sizeof(Stored))) + v;
      store_any<Stored>(out + j * sizeof(Stored), E::round(sum));
    }
  }
}

}  // namespace moeccl::cuda
