// SPDX-License-Identifier: Apache-2.0
// Entry points: bytes, rows of bytes.
#include "kernels/cuda/copy.cuh"

using namespace moeccl::cuda;

MOECCL_KERNEL(moeccl_copy, CopyArgs) {
  const Team team = whole_grid();
  copy_span(a.dst, a.src, a.bytes, team.thread, team.n_threads);
}
MOECCL_KERNEL(moeccl_copy_rows, RowsKernelArgs) { copy_rows(a, whole_grid()); }
