// SPDX-License-Identifier: Apache-2.0
// Entry points: routing.
#include "kernels/cuda/records.cuh"
#include "kernels/cuda/route.cuh"

using namespace moeccl::cuda;

MOECCL_KERNEL(moeccl_route_count, RouteKernelArgs) { route_count(a); }
MOECCL_KERNEL(moeccl_route_scan, RouteKernelArgs) { route_scan(a); }
MOECCL_KERNEL(moeccl_route_fill, RouteKernelArgs) { route_fill(a); }
MOECCL_KERNEL(moeccl_route_order, RouteOrderKernelArgs) { route_order(a); }
MOECCL_KERNEL(moeccl_route_drop, RouteDropKernelArgs) { route_drop(a); }
MOECCL_KERNEL(moeccl_route_levels, RouteLevelsKernelArgs) { route_levels(a); }
MOECCL_KERNEL(moeccl_route_records_count, RouteRecordsKernelArgs) { route_records_count(a); }
MOECCL_KERNEL(moeccl_route_records_scan, RouteRecordsKernelArgs) { route_records_scan(a); }
MOECCL_KERNEL(moeccl_route_records_fill, RouteRecordsKernelArgs) { route_records_fill(a); }
