// SPDX-License-Identifier: Apache-2.0
// Prefix sums over the lanes of a warp and over the threads of a block.
#pragma once

#include "kernels/cuda/device.cuh"

namespace moeccl::cuda {

// Returns the sum over the lanes up to and including this one.
MOECCL_DEVICE uint32_t warp_prefix(uint32_t v, uint32_t lane) {
  for (uint32_t step = 1; step < kWarp; step *= 2) {
    const uint32_t u = shuffle(v, lane >= step ? lane - step : lane);
    v += lane >= step ? u : 0;
  }
  return v;
}

// Sets sums[t] to the sum of `own` over threads 0 to t. All threads of the block call it; sums is shared.
MOECCL_DEVICE void block_prefix(uint32_t* sums, uint32_t own) {
  const uint32_t t = thread_index(), n = block_threads();
  sums[t] = own;
  block_sync();
  for (uint32_t step = 1; step < n; step *= 2) {
    const uint32_t v = t >= step ? sums[t - step] : 0;
    block_sync();
    sums[t] += v;
    block_sync();
  }
}

}  // namespace moeccl::cuda
