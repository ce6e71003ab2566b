// SPDX-License-Identifier: Apache-2.0
// What the control groups around this process, and the host, leave it of processors and memory. `root` is put in front
// of /proc and /sys in tests.
#pragma once

#include <cstdint>
#include <string>

#include "src/base/status.h"

namespace moeccl::driver {

inline constexpr uint64_t kUnlimited = ~uint64_t{0};

// Returns how many processors' worth of time this process's control groups may use (docker --cpus, Kubernetes' limits),
// rounded down, but at least 1; 0: no limit. A group that spins on more processors is stopped for the rest of each
// period.
uint32_t cpu_quota(const std::string& root = "");
// OutOfMemory, with the limit, if the control groups of this process (docker -m, Kubernetes' limits, Slurm's --mem)
// have less than `bytes` left. What the kernel can drop or swap out counts as free.
Status control_groups_have(uint64_t bytes, const std::string& root = "");
// The same for the host's memory and swap.
Status host_has(uint64_t bytes, const std::string& root = "");

// Returns how many bytes of memory this process can still take, by its control groups and by what the host has;
// kUnlimited if nothing says. All processes in the groups, or on the host, share them.
uint64_t memory_left(const std::string& root = "");
// Returns the least limit of memory of the control groups around this process; kUnlimited if there is none.
uint64_t memory_limit(const std::string& root = "");

// Returns an entry of such a text as /proc/meminfo: "MemTotal:  15427688 kB" in bytes, and counts without a unit as
// they are. 0: there is none.
uint64_t entry(const std::string& text, const char* name);

}  // namespace moeccl::driver
