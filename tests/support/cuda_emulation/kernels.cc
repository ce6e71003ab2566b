// SPDX-License-Identifier: Apache-2.0
// All kernels of kernels/cuda and of the ladder, compiled for the launch emulation.
#include "tests/gpu/ladder/kernels.cu"
#include "kernels/cuda/copy.cu"
#include "kernels/cuda/messages.cu"
#include "kernels/cuda/reduce.cu"
#include "kernels/cuda/route.cu"
#include "kernels/cuda/rows.cu"
#include "kernels/cuda/sparse.cu"
#include "kernels/cuda/tables.cu"
#include "kernels/cuda/walk.cu"
#include "kernels/cuda/walk_rows.cu"
