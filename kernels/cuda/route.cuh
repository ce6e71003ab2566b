// SPDX-License-Identifier: Apache-2.0
// Routing on the device: counts, prefix sums and row lists of every map's groups; see RouteKernelArgs. The result does
// not depend on the order in which blocks or threads run.
#pragma once

#include "kernels/cuda/args.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/scan.cuh"

namespace moeccl::cuda {

// Calls fn(slot) once for each slot that the token reaches.
template <class Fn>
MOECCL_DEVICE void for_each_slot(const RouteKernelArgs& a, uint32_t token, Fn&& fn) {
  const int32_t* choice = a.topk + static_cast<size_t>(token) * a.top_k;
  for (uint32_t m = 0; m < a.n_maps; ++m) {
    const int32_t* map = a.map + static_cast<size_t>(m) * a.n_experts;
    for (uint32_t k = 0; k < a.top_k; ++k) {
      const auto expert = static_cast<uint32_t>(choice[k]);
      if (expert >= a.n_experts || map[expert] < 0) continue;
      bool fresh = true;
      for (uint32_t before = 0; before < k; ++before) {
        const auto other = static_cast<uint32_t>(choice[before]);
        fresh = fresh && !(other < a.n_experts && map[other] == map[expert]);
      }
      if (fresh) fn(static_cast<uint32_t>(map[expert]));
    }
  }
}

MOECCL_DEVICE bool choices_bad(const RouteKernelArgs& a, uint32_t token) {
  const int32_t* choice = a.topk + static_cast<size_t>(token) * a.top_k;
  for (uint32_t k = 0; k < a.top_k; ++k) {
    if (choice[k] == -1) continue;
    if (static_cast<uint32_t>(choice[k]) >= a.n_experts) return true;
    for (uint32_t before = 0; before < k; ++before)
      if (choice[before] == choice[k]) return true;
  }
  return false;
}

MOECCL_DEVICE void route_count(const RouteKernelArgs& a) {
  for (uint32_t tile = block_index(); tile < a.n_tiles; tile += grid_blocks()) {
    uint32_t* count = a.tile_count + static_cast<size_t>(tile) * a.n_slots;
    for (uint32_t s = thread_index(); s < a.n_slots; s += block_threads()) count[s] = 0;
    block_sync();
    for (uint32_t i = thread_index(); i < kRouteTile; i += block_threads()) {
      const uint32_t token = tile * kRouteTile + i;
      if (token >= a.n_tokens) continue;
      if (choices_bad(a, token)) atomic_min(a.bad, token);
      for_each_slot(a, token, [&](uint32_t slot) { atomic_add(&count[slot], 1); });
    }
  }
}

// Runs in one block: sums over the tiles of each slot, then over the slots.
MOECCL_DEVICE void route_scan(const RouteKernelArgs& a) {
  MOECCL_SHARED uint32_t sums[kBlockThreads];
  const uint32_t t = thread_index(), n = block_threads();
  uint32_t before = 0;
  for (uint32_t base = 0; base < a.n_slots; base += n) {
    const uint32_t slot = base + t;
    uint32_t own = 0;
    for (uint32_t tile = 0; slot < a.n_slots && tile < a.n_tiles; ++tile)
      own += a.tile_count[static_cast<size_t>(tile) * a.n_slots + slot];
    block_prefix(sums, own);
    const uint32_t all = sums[n - 1];
    uint32_t running = before + sums[t] - own;
    if (slot < a.n_slots) a.first[slot] = running;
    for (uint32_t tile = 0; slot < a.n_slots && tile < a.n_tiles; ++tile) {
      uint32_t& cell = a.tile_count[static_cast<size_t>(tile) * a.n_slots + slot];
      const uint32_t here = cell;
      cell = running;
      running += here;
    }
    before += all;
    block_sync();
  }
  if (t == 0) a.first[a.n_slots] = before;
}

// A token's place in a slot's list: the tile's first place plus the tile's tokens before it, counted in bitmaps.
inline constexpr uint32_t kSlotBatch = 256;
MOECCL_DEVICE void route_fill(const RouteKernelArgs& a) {
  constexpr uint32_t kWords = kRouteTile / 32;
  MOECCL_SHARED uint32_t member[kSlotBatch][kWords];
  for (uint32_t tile = block_index(); tile < a.n_tiles; tile += grid_blocks()) {
    for (uint32_t base = 0; base < a.n_slots; base += kSlotBatch) {
      block_sync();
      for (uint32_t i = thread_index(); i < kSlotBatch * kWords; i += block_threads())
        member[i / kWords][i % kWords] = 0;
      block_sync();
      for (uint32_t i = thread_index(); i < kRouteTile; i += block_threads()) {
        const uint32_t token = tile * kRouteTile + i;
        if (token >= a.n_tokens) continue;
        for_each_slot(a, token, [&](uint32_t slot) {
          if (slot - base < kSlotBatch) atomic_or(&member[slot - base][i / 32], 1u << (i % 32));
        });
      }
      block_sync();
      for (uint32_t i = thread_index(); i < kRouteTile; i += block_threads()) {
        const uint32_t token = tile * kRouteTile + i;
        if (token >= a.n_tokens) continue;
        for_each_slot(a, token, [&](uint32_t slot) {
          if (slot - base >= kSlotBatch) return;
          const uint32_t* bits = member[slot - base];
          uint32_t rank = count_bits(bits[i / 32] & ((1u << (i % 32)) - 1));
          for (uint32_t w = 0; w < i / 32; ++w) rank += count_bits(bits[w]);
          a.list[a.tile_count[static_cast<size_t>(tile) * a.n_slots + slot] + rank] = token;
        });
      }
    }
  }
}

}  // namespace moeccl::cuda
