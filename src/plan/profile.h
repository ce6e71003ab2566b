// What the machine does in a nanosecond: the numbers under which cost.h prices a plan. The defaults are those of a
// 2-core EPYC virtual machine (docs/decisions.md); calibration replaces them.
#pragma once

#include <cstdint>
#include <vector>

#include "src/plan/levels.h"

namespace moeccl::plan {

struct Profile {
  // Per level of the tree, outermost first; overrides the tree's own LinkCost. Shorter, or without figures: the tree's.
  std::vector<LinkCost> links;

  // One core, bytes copied. Beyond the cache; with stores past the cache; with everything in the cache. One memcpy of
  // 64 MiB runs at 8.7 GB/s, non-temporal at 17.7 GB/s.
  double copy_bytes_per_ns = 8.7;
  double stream_bytes_per_ns = 17.0;
  double cached_copy_bytes_per_ns = 14.0;
  // One core, bytes read as sources of a reduction (reading alone: 31 GB/s).
  double reduce_bytes_per_ns = 14.0;
  double cached_reduce_bytes_per_ns = 20.0;
  // One core, process_vm_readv from a peer that is reached by reading alone: 4.3 GB/s beyond the cache with 4 KiB
  // pages, 8 in it.
  double read_bytes_per_ns = 4.5;
  double read_call_ns = 1000;
  // All cores of a host, bytes copied: 19-20 GB/s.
  double host_copy_bytes_per_ns = 20.0;
  uint64_t cache_bytes = 2u << 20;        // of a core: L2 and its share of L3
  uint64_t stream_from_bytes = 4u << 20;  // Outputs from this size on are written past the cache

  double signal_ns = 68;    // until a flag set on one core is seen on another
  double step_ns = 40;      // to take up one step
  double start_ns = 300;    // of an operation: before its first and after its last step
  double switch_ns = 2100;  // until a blocked rank has given its core to the next one (sched_yield)
  uint32_t cores = 2;       // of a host; ranks share them when there are more
  // Ranks of one group of this level share a host. Below 0: all ranks do, as when one machine stands for a cluster.
  int host_level = -1;
};

}  // namespace moeccl::plan
