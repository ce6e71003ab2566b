// SPDX-License-Identifier: Apache-2.0
#include "src/driver/limits/control_groups.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <sstream>
#include <vector>

#include "src/driver/sysfs.h"

namespace moeccl::driver {

uint64_t entry(const std::string& text, const char* name) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    const uint64_t value = std::strtoull(line.c_str() + std::strlen(name) + 1, nullptr, 10);
    return line.ends_with("kB") ? value << 10 : value;
  }
  return 0;
}

namespace {

constexpr const char* kGroups = "sys/fs/cgroup";

struct GroupFiles {
  const char *controller, *folder, *limit, *used, *files;  // `files` begins the names in memory.stat
};
constexpr GroupFiles kVersion1 = {"memory", "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                                  "total_"};
constexpr GroupFiles kVersion2 = {"", kGroups, "memory.max", "memory.current", ""};

// Returns the folders below `top` of the control groups around this process, its own first: each of them may have a
// limit. `controller` is "" in version 2, which has one hierarchy for all.
std::vector<std::string> group_folders(const Sysfs& files, const std::string& controller, const std::string& top) {
  std::string group;
  std::istringstream lines(files.read("proc/self/cgroup"));
  // "4:cpu,cpuacct:/job/step" in version 1, "0::/job/step" in version 2; both may be there.
  for (std::string line; std::getline(lines, line);) {
    const size_t first = line.find(':') + 1, end = line.find(':', first);
    if (end == std::string::npos) continue;
    const std::string list = format(",{},", line.substr(first, end - first));
    if (list.find(format(",{},", controller)) != std::string::npos) group = line.substr(end + 1);
  }
  // In a container, the top may show the process's own group, while these folders are those of the host.
  std::vector<std::string> folders;
  for (group = group == "/" ? "" : group; !group.empty(); group.resize(std::min(group.size() - 1, group.rfind('/'))))
    folders.push_back(top + group);
  folders.push_back(top);
  return folders;
}

// Calls body(names, folder) for each control group around this process that may limit its memory.
template <class Body>
void each_memory_group(const Sysfs& files, const Body& body) {
  for (const GroupFiles& names : {kVersion1, kVersion2})
    for (const std::string& folder : group_folders(files, names.controller, names.folder)) body(names, folder);
}

struct GroupRoom {
  std::string limit_file;
  int64_t limit, left;
};

// Returns nothing if the group has no limit. Stops counting where `enough` bytes are left.
std::optional<GroupRoom> room_of_group(uint64_t enough, const Sysfs& files, const GroupFiles& names,
                                       const std::string& folder) {
  const std::string limit_file = format("{}/{}", folder, names.limit);
  const int64_t limit = files.number(limit_file, -1), used = files.number(format("{}/{}", folder, names.used), -1);
  if (limit < 0 || used < 0) return std::nullopt;  // not there, or "max"
  if (limit >= used && static_cast<uint64_t>(limit - used) >= enough) return GroupRoom{limit_file, limit, limit - used};
  const std::string stat = files.read(folder + "/memory.stat");
  uint64_t free = 0;
  for (const char* kind : {"active_file", "inactive_file", "slab_reclaimable"})
    free += entry(stat, format("{}{}", names.files, kind).c_str());
  const int64_t swap_left = files.number(folder + "/memory.swap.max", std::numeric_limits<int64_t>::max()) -
                            files.number(folder + "/memory.swap.current", 0);
  free +=
      std::min(entry(files.read("proc/meminfo"), "SwapFree:"), static_cast<uint64_t>(std::max<int64_t>(swap_left, 0)));
  return GroupRoom{limit_file, limit, std::max<int64_t>(limit - used + static_cast<int64_t>(free), 0)};
}

Status group_has(uint64_t bytes, const Sysfs& files, const GroupFiles& names, const std::string& folder) {
  const std::optional<GroupRoom> room = room_of_group(bytes, files, names, folder);
  if (!room.has_value() || static_cast<uint64_t>(room->left) >= bytes) return {};
  return error(
      moecclOutOfMemory,
      "{} bytes of memory: this process's control group may use {} bytes (/{}) and has {} left: raise its limit "
      "(docker -m, Kubernetes' limits.memory, srun --mem), or use less; MOECCL_STAGING_BYTES lowers what each "
      "communicator holds",
      bytes, room->limit, room->limit_file, room->left);
}

}  // namespace

uint32_t cpu_quota(const std::string& root) {
  const Sysfs files(root.empty() ? "/" : root);
  long long least = 0;
  const auto take = [&least](long long quota_us, long long period_us) {
    if (quota_us <= 0 || period_us <= 0) return;
    const long long cpus = std::clamp<long long>(quota_us / period_us, 1, UINT32_MAX);
    least = least == 0 ? cpus : std::min(least, cpus);
  };
  for (const std::string& folder : group_folders(files, "", kGroups)) {
    long long quota_us = 0, period_us = 0;
    // "max 100000" does not match.
    if (std::sscanf(files.read(folder + "/cpu.max").c_str(), "%lld %lld", &quota_us, &period_us) == 2)
      take(quota_us, period_us);
  }
  for (const std::string& folder : group_folders(files, "cpu", "sys/fs/cgroup/cpu"))
    take(files.number(folder + "/cpu.cfs_quota_us", -1), files.number(folder + "/cpu.cfs_period_us", 0));
  return static_cast<uint32_t>(least);
}

Status control_groups_have(uint64_t bytes, const std::string& root) {
  const Sysfs files(root.empty() ? "/" : root);
  Status enough;
  each_memory_group(files, [&](const GroupFiles& names, const std::string& folder) {
    if (enough.ok()) enough = group_has(bytes, files, names, folder);
  });
  return enough;
}

Status host_has(uint64_t bytes, const std::string& root) {
  const std::string meminfo = Sysfs(root.empty() ? "/" : root).read("proc/meminfo");
  const uint64_t available = entry(meminfo, "MemAvailable:"), swap = entry(meminfo, "SwapFree:");
  if (available == 0 || available + swap >= bytes) return {};
  return error(
      moecclOutOfMemory,
      "{} bytes of memory: the host has {} available, and {} of swap: use less (MOECCL_STAGING_BYTES lowers what "
      "each communicator holds), or start fewer ranks here",
      bytes, available, swap);
}

uint64_t memory_left(const std::string& root) {
  const Sysfs files(root.empty() ? "/" : root);
  uint64_t left = kUnlimited;
  each_memory_group(files, [&](const GroupFiles& names, const std::string& folder) {
    if (const auto room = room_of_group(kUnlimited, files, names, folder); room.has_value())
      left = std::min(left, static_cast<uint64_t>(room->left));
  });
  const std::string meminfo = files.read("proc/meminfo");
  const uint64_t available = entry(meminfo, "MemAvailable:");
  return available == 0 ? left : std::min(left, available + entry(meminfo, "SwapFree:"));
}

uint64_t memory_limit(const std::string& root) {
  const Sysfs files(root.empty() ? "/" : root);
  uint64_t least = kUnlimited;
  each_memory_group(files, [&](const GroupFiles& names, const std::string& folder) {
    const int64_t bytes = files.number(format("{}/{}", folder, names.limit), -1);
    // Version 1 expresses "no limit" as a number near 2^63.
    if (bytes > 0 && bytes < int64_t{1} << 60) least = std::min(least, static_cast<uint64_t>(bytes));
  });
  return least;
}

}  // namespace moeccl::driver
