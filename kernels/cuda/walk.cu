// SPDX-License-Identifier: Apache-2.0
// Entry points: a rank's whole program in one launch, for the type of its reductions (any type for other programs).
#include "kernels/cuda/walk.cuh"

using namespace moeccl::cuda;

#define MOECCL_WALK(number, Type) \
  MOECCL_KERNEL(moeccl_walk_##number, WalkArgs) { walk<Type>(a); }
MOECCL_FOR_EACH_TYPE(MOECCL_WALK)
