// SPDX-License-Identifier: Apache-2.0
// Entry points: the persistent kernel for dispatch and combine, and for AllToAllv.
#include "kernels/cuda/walk_rows.cuh"

using namespace moeccl::cuda;

MOECCL_KERNEL(moeccl_walk_rows, WalkRowsArgs) { walk_rows(a); }
MOECCL_KERNEL(moeccl_walk_splits, WalkSplitsArgs) { walk_all_to_all_v(a); }
