// SPDX-License-Identifier: Apache-2.0
// Limits, permissions and loaded kernel modules of this process and host, for a report. Only reads, except that two
// short-lived children try to read each other's memory.
#pragma once

#include <cstdint>
#include <string>

#include "src/base/status.h"
#include "src/driver/memory.h"
#include "src/driver/mps.h"

namespace moeccl::driver {

inline constexpr uint64_t kUnlimited = ~uint64_t{0};

struct HostLimits {
  std::string kernel;  // "6.1.0-13-amd64"
  uint32_t n_usable_cpus = 0;
  uint64_t memory_bytes = 0, available_bytes = 0;  // of the machine; what the kernel could give now
  uint64_t cgroup_bytes = kUnlimited;              // this process's control group

  bool has_shm = false;  // /dev/shm
  uint64_t shm_bytes = 0, shm_free_bytes = 0;
  uint64_t memlock_bytes = 0, memlock_hard_bytes = 0;
  uint64_t n_files = 0, n_files_hard = 0;

  // The result of process_vm_readv between two children of this process, which are related like ranks of one launcher.
  Status cma;
  int yama_scope = -1;  // kernel.yama.ptrace_scope; -1: no Yama

  std::string huge_pages_anonymous, huge_pages_shared;  // "always", "madvise", "never", ...; "" if unknown
  uint64_t n_huge_pages = 0, n_free_huge_pages = 0, huge_page_bytes = 0;

  std::string nvidia_module;    // /proc/driver/nvidia/version, first line; "" when the module is not loaded
  bool peer_memory = false;     // nvidia_peermem (formerly nv_peer_mem): RDMA from GPU memory
  bool infiniband_dev = false;  // /dev/infiniband
  Mps mps;
};

// `root` is put in front of /proc, /sys and /dev in tests. The limits of the process are always its own.
HostLimits host_limits(const std::string& root = "");
// Returns how many processors' worth of time this process's control group may use (docker --cpus, Kubernetes' limits),
// rounded down, but at least 1; 0: no limit. A group that spins on more processors is stopped for the rest of each
// period.
uint32_t cpu_quota(const std::string& root = "");
// Returns as many of the processors as a quota lets run at once.
CoreSet within_quota(CoreSet cores, uint32_t quota);

}  // namespace moeccl::driver
