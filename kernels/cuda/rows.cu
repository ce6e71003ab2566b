// SPDX-License-Identifier: Apache-2.0
// Entry points: rows with arithmetic, one kernel for each type.
#include "kernels/cuda/rows.cuh"

using namespace moeccl::cuda;

#define MOECCL_ROWS(number, Type)                                                                          \
  MOECCL_KERNEL(moeccl_scale_rows_##number, RowsKernelArgs) { scale_rows<Type>(a, whole_grid()); }         \
  MOECCL_KERNEL(moeccl_reduce_rows_##number, ReduceRowsKernelArgs) { reduce_rows<Type>(a, whole_grid()); } \
  MOECCL_KERNEL(moeccl_dot_rows_##number, DotRowsKernelArgs) { dot_rows<Type>(a, whole_grid()); }
MOECCL_FOR_EACH_TYPE(MOECCL_ROWS)
