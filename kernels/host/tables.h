// SPDX-License-Identifier: Apache-2.0
// The tables that select() chooses from. An overlay's functions may be called only on a processor that has its
// instructions.
#pragma once

#include "kernels/table.h"

namespace moeccl::kernels {

// The partial sums of dot_rows. The number is fixed, so that the order of summation, and with it the result, is the
// same in every table. 32 lanes are two AVX-512 accumulators, enough to hide the latency of an addition behind two
// loads each.
inline constexpr size_t kDotLanes = 32;

const KernelTable& reference_table();
const KernelTable& avx2_table();
const KernelTable& avx512_table();
const KernelTable& neon_table();

}  // namespace moeccl::kernels
