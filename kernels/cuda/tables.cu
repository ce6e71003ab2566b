// SPDX-License-Identifier: Apache-2.0
// Entry points: a routing's tables from all ranks' choices.
#include "kernels/cuda/tables.cuh"

using namespace moeccl::cuda;

MOECCL_KERNEL(moeccl_table_take, TableOwnKernelArgs) { table_take(a); }
MOECCL_KERNEL(moeccl_table_pack, TableOwnKernelArgs) { table_pack(a); }
MOECCL_KERNEL(moeccl_table_count, TablesKernelArgs) { table_count(a); }
MOECCL_KERNEL(moeccl_table_scan, TablesKernelArgs) { table_scan(a); }
MOECCL_KERNEL(moeccl_table_blocks, TablesKernelArgs) { table_blocks(a); }
MOECCL_KERNEL(moeccl_table_fill, TablesKernelArgs) { table_fill(a); }
