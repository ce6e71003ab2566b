// SPDX-License-Identifier: Apache-2.0
// Limits, permissions and loaded kernel modules of this process and host, for a report. Only reads, except for
// raise_file_limit() and that two short-lived children try to read each other's memory.
#pragma once

#include <cstdint>
#include <string>

#include "src/base/status.h"
#include "src/driver/limits/control_groups.h"
#include "src/driver/memory.h"
#include "src/driver/mps.h"

namespace moeccl::driver {

struct HostLimits {
  std::string kernel;  // "6.1.0-13-amd64"
  uint32_t n_usable_cpus = 0;
  uint64_t memory_bytes = 0;           // of the machine
  uint64_t cgroup_bytes = kUnlimited;  // the least limit of the control groups around this process

  bool has_shm = false;  // /dev/shm
  uint64_t shm_bytes = 0, shm_free_bytes = 0;
  uint64_t memlock_bytes = 0;  // kUnlimited also with CAP_IPC_LOCK
  uint64_t n_files = 0, n_files_hard = 0;

  // The result of process_vm_readv between two children of this process, which are related like ranks of one launcher.
  Status cma;
  int yama_scope = -1;  // kernel.yama.ptrace_scope; -1: no Yama

  std::string huge_pages_anonymous, huge_pages_shared;  // "always", "madvise", "never", ...; "" if unknown
  uint64_t n_huge_pages = 0;                            // reserved ones
  uint64_t huge_page_bytes = 0;                         // of a transparent one; 0: unknown

  std::string nvidia_module;    // /proc/driver/nvidia/version, first line; "" when the module is not loaded
  bool peer_memory = false;     // nvidia_peermem (formerly nv_peer_mem): RDMA from GPU memory
  bool infiniband_dev = false;  // /dev/infiniband
  Mps mps;
};

// `root` is put in front of /proc, /sys and /dev in tests. The limits of the process are always its own.
HostLimits host_limits(const std::string& root = "");
// Returns how many bytes this process may still lock for RDMA, which counts a piece of memory once for each device;
// kUnlimited if nothing limits that, or if the host has no RDMA device.
uint64_t lockable_left(const std::string& root = "");
// Returns the size that the files of this process, and its shared segments, may have (ulimit -f).
uint64_t file_bytes_limit();

// Raises this process's limit of open files to its hard limit, but to at most kMostFiles: connections to many hosts
// need more than the usual 1024.
inline constexpr uint64_t kMostFiles = uint64_t{1} << 20;
void raise_file_limit();

}  // namespace moeccl::driver
