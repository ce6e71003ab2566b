// SPDX-License-Identifier: Apache-2.0
// Entry points: reductions, one kernel for each type; the operator is an argument.
#include "kernels/cuda/reduce.cuh"

using namespace moeccl::cuda;

#define MOECCL_REDUCE(number, Type) \
  MOECCL_KERNEL(moeccl_reduce_##number, ReduceKernelArgs) { reduce<Type, true>(a, whole_grid()); }
MOECCL_FOR_EACH_TYPE(MOECCL_REDUCE)
