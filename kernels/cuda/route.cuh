// SPDX-License-Identifier: Apache-2.0
// Lists of every expert's tokens: counts, prefix sums and fill; see RouteKernelArgs. The result does not depend on the
// order in which blocks or threads run.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/route_args.h"
#include "kernels/cuda/scan.cuh"

namespace moeccl::cuda {

// Calls fn(expert) once for each expert that the token names.
template <class Fn>
MOECCL_DEVICE void for_each_expert(const RouteKernelArgs& a, uint32_t token, Fn&& fn) {
  const int32_t* choice = a.topk + static_cast<size_t>(token) * a.top_k;
  for (uint32_t k = 0; k < a.top_k; ++k) {
    bool fresh = static_cast<uint32_t>(choice[k]) < a.n_experts;
    for (uint32_t before = 0; before < k; ++before) fresh = fresh && choice[before] != choice[k];
    if (fresh) fn(static_cast<uint32_t>(choice[k]));
  }
}

MOECCL_DEVICE void route_count(const RouteKernelArgs& a) {
  for (uint32_t tile = block_index(); tile < a.n_tiles; tile += grid_blocks()) {
    uint32_t* count = a.tile_count + static_cast<size_t>(tile) * a.n_experts;
    for (uint32_t e = thread_index(); e < a.n_experts; e += block_threads()) count[e] = 0;
    block_sync();
    for (uint32_t i = thread_index(); i < kRouteTile; i += block_threads()) {
      const uint32_t token = tile * kRouteTile + i;
      if (token >= a.n_tokens) continue;
      for_each_expert(a, token, [&](uint32_t e) { atomic_add(&count[e], 1); });
    }
  }
}

// Runs in one block: sums over the tiles of each expert, then over the experts.
MOECCL_DEVICE void route_scan(const RouteKernelArgs& a) {
  MOECCL_SHARED uint32_t sums[kBlockThreads];
  const uint32_t t = thread_index(), n = block_threads();
  uint32_t before = 0;
  for (uint32_t base = 0; base < a.n_experts; base += n) {
    const uint32_t e = base + t;
    uint32_t own = 0;
    for (uint32_t tile = 0; e < a.n_experts && tile < a.n_tiles; ++tile)
      own += a.tile_count[static_cast<size_t>(tile) * a.n_experts + e];
    block_prefix(sums, own);
    const uint32_t all = sums[n - 1];
    uint32_t running = before + sums[t] - own;
    if (e < a.n_experts) a.first[e] = running;
    for (uint32_t tile = 0; e < a.n_experts && tile < a.n_tiles; ++tile) {
      uint32_t& cell = a.tile_count[static_cast<size_t>(tile) * a.n_experts + e];
      const uint32_t here = cell;
      cell = running;
      running += here;
    }
    before += all;
    block_sync();
  }
  if (t == 0) a.first[a.n_experts] = before;
}

// A token's place in an expert's list: the tile's first place plus the tile's tokens before it, counted in bitmaps.
inline constexpr uint32_t kExpertBatch = 256;
MOECCL_DEVICE void route_fill(const RouteKernelArgs& a) {
  constexpr uint32_t kWords = kRouteTile / 32;
  MOECCL_SHARED uint32_t member[kExpertBatch][kWords];
  for (uint32_t tile = block_index(); tile < a.n_tiles; tile += grid_blocks()) {
    for (uint32_t base = 0; base < a.n_experts; base += kExpertBatch) {
      block_sync();
      for (uint32_t i = thread_index(); i < kExpertBatch * kWords; i += block_threads())
        member[i / kWords][i % kWords] = 0;
      block_sync();
      for (uint32_t i = thread_index(); i < kRouteTile; i += block_threads()) {
        const uint32_t token = tile * kRouteTile + i;
        if (token >= a.n_tokens) continue;
        for_each_expert(a, token, [&](uint32_t e) {
          if (e - base < kExpertBatch) atomic_or(&member[e - base][i / 32], 1u << (i % 32));
        });
      }
      block_sync();
      for (uint32_t i = thread_index(); i < kRouteTile; i += block_threads()) {
        const uint32_t token = tile * kRouteTile + i;
        if (token >= a.n_tokens) continue;
        for_each_expert(a, token, [&](uint32_t e) {
          if (e - base >= kExpertBatch) return;
          const uint32_t* bits = member[e - base];
          uint32_t rank = count_bits(bits[i / 32] & ((1u << (i % 32)) - 1));
          for (uint32_t w = 0; w < i / 32; ++w) rank += count_bits(bits[w]);
          a.list[a.tile_count[static_cast<size_t>(tile) * a.n_experts + e] + rank] = token;
        });
      }
    }
  }
}

}  // namespace moeccl::cuda
