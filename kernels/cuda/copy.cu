// SPDX-License-Identifier: Apache-2.0
// Entry points: bytes, rows of bytes.
#include "kernels/cuda/copy.cuh"

using namespace moeccl::cuda;

MOECCL_KERNEL(moeccl_copy, CopyArgs) {
  const Team team = whole_grid();
  copy_span(a.dst, a.src, a.bytes, team.thread, team.n_threads);
}
// Both pointers must be 16-byte aligned. Copies like moeccl_copy if the device has no bulk copies.
MOECCL_KERNEL(moeccl_copy_bulk, CopyArgs) {
  if constexpr (kHasBulk) {
    copy_bulk(a);
  } else {
    const Team team = whole_grid();
    copy_span(a.dst, a.src, a.bytes, team.thread, team.n_threads);
  }
}
MOECCL_KERNEL(moeccl_copy_rows, RowsKernelArgs) { copy_rows(a, whole_grid()); }
