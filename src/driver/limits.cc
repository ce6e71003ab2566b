// SPDX-License-Identifier: Apache-2.0
#include "src/driver/limits.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

#include "src/driver/affinity.h"
#include "src/driver/sysfs.h"

namespace moeccl::driver {

namespace {

uint64_t limit_of(rlim_t value) { return value == RLIM_INFINITY ? kUnlimited : static_cast<uint64_t>(value); }

// "always [madvise] never" -> "madvise"
std::string chosen(const std::string& text) {
  const size_t open = text.find('['), close = text.find(']');
  return open == std::string::npos || close == std::string::npos || close < open
             ? ""
             : text.substr(open + 1, close - open - 1);
}

// Returns an entry such as "MemTotal:  15427688 kB" in bytes. Counts without a unit are returned as they are.
uint64_t entry(const std::string& meminfo, const char* name) {
  std::istringstream lines(meminfo);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(name)) continue;
    const uint64_t value = std::strtoull(line.c_str() + std::strlen(name) + 1, nullptr, 10);
    return line.ends_with("kB") ? value << 10 : value;
  }
  return 0;
}

// The memory that the two children share with this process. Between fork() and _exit() they make only system calls,
// because another thread may have held any lock at the fork.
struct Trial {
  std::atomic<pid_t> reader_may_start{0};  // the pid to read; release by the parent, acquire by the reader
  int error_number = EIO;                  // the reader's result; where SIGCHLD is ignored, its exit status is lost
};

uint64_t g_secret = 0;  // private to each process; one child reads the other's

constexpr uint64_t kValue = 0x6d6f6563636cu;

void end_with(pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
}

[[noreturn]] void be_read() {
  g_secret = kValue;
  for (;;) pause();
}

[[noreturn]] void read_other(Trial* trial) {
  pid_t other = 0;
  while ((other = trial->reader_may_start.load(std::memory_order_acquire)) == 0) sched_yield();
  uint64_t value = 0;
  iovec local = {&value, sizeof(value)}, remote = {&g_secret, sizeof(g_secret)};
  for (int i = 0; i < 1000; ++i) {  // until the other child has set its value
    errno = 0;
    const ssize_t n = process_vm_readv(other, &local, 1, &remote, 1, 0);
    if (n != sizeof(value)) {
      if (errno != 0) trial->error_number = errno;
      _exit(1);
    }
    if (value == kValue) {
      trial->error_number = 0;
      _exit(0);
    }
    timespec pause_time = {0, 1'000'000};
    nanosleep(&pause_time, nullptr);
  }
  _exit(1);
}

Status try_cma() {
  void* shared = mmap(nullptr, sizeof(Trial), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return system_error("shared memory for the trial of process_vm_readv", errno);
  auto* trial = new (shared) Trial;
  Status status;
  const pid_t parent = getpid();
  const pid_t target = fork();
  if (target == 0) end_with(parent), be_read();
  const pid_t reader = target < 0 ? -1 : fork();
  if (reader == 0) end_with(parent), read_other(trial);
  if (target < 0 || reader < 0) {
    status = system_error("fork for the trial of process_vm_readv", errno);
  } else {
    trial->reader_may_start.store(target, std::memory_order_release);
    while (waitpid(reader, nullptr, 0) < 0 && errno == EINTR) continue;
    if (trial->error_number != 0)
      status = system_error("process_vm_readv between sibling processes", trial->error_number);
  }
  if (target > 0) {
    kill(target, SIGKILL);
    while (waitpid(target, nullptr, 0) < 0 && errno == EINTR) continue;
  }
  munmap(shared, sizeof(Trial));
  return status;
}

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

Status group_has(uint64_t bytes, const Sysfs& files, const GroupFiles& names, const std::string& folder) {
  const std::string limit_file = format("{}/{}", folder, names.limit);
  const int64_t limit = files.number(limit_file, -1), used = files.number(format("{}/{}", folder, names.used), -1);
  if (limit < 0 || used < 0) return {};  // not there, or "max"
  const auto fits = [&](int64_t room) { return room >= 0 && static_cast<uint64_t>(room) >= bytes; };
  if (fits(limit - used)) return {};
  const std::string stat = files.read(folder + "/memory.stat");
  uint64_t free = 0;
  for (const char* kind : {"active_file", "inactive_file", "slab_reclaimable"})
    free += entry(stat, format("{}{}", names.files, kind).c_str());
  const int64_t swap_left = files.number(folder + "/memory.swap.max", std::numeric_limits<int64_t>::max()) -
                            files.number(folder + "/memory.swap.current", 0);
  free +=
      std::min(entry(files.read("proc/meminfo"), "SwapFree:"), static_cast<uint64_t>(std::max<int64_t>(swap_left, 0)));
  const int64_t left = limit - used + static_cast<int64_t>(free);
  if (fits(left)) return {};
  return error(
      moecclOutOfMemory,
      "{} bytes of memory: this process's control group may use {} bytes (/{}) and has {} left: raise its limit "
      "(docker -m, Kubernetes' limits.memory, srun --mem), or use less; MOECCL_STAGING_BYTES lowers what each "
      "communicator holds",
      bytes, limit, limit_file, std::max<int64_t>(left, 0));
}

// The kernel looks for this capability in the first user namespace only, which maps all users to themselves.
bool locks_without_limit(const Sysfs& files) {
  constexpr int kIpcLock = 14;  // CAP_IPC_LOCK
  const std::string status = files.read("proc/self/status"), mark = "\nCapEff:";
  const size_t at = status.find(mark);
  return at != std::string::npos && files.read("proc/self/uid_map").ends_with(" 4294967295") &&
         (std::strtoull(status.c_str() + at + mark.size(), nullptr, 16) >> kIpcLock & 1) != 0;
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
  for (const GroupFiles& names : {kVersion1, kVersion2})
    for (const std::string& folder : group_folders(files, names.controller, names.folder))
      MOECCL_TRY(group_has(bytes, files, names, folder));
  return {};
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

void raise_file_limit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  const rlim_t most = std::min<rlim_t>(limit.rlim_max, kMostFiles);
  if (limit.rlim_cur >= most) return;
  limit.rlim_cur = most;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

HostLimits host_limits(const std::string& root) {
  HostLimits l;
  const Sysfs files(root.empty() ? "/" : root);
  utsname name = {};
  if (uname(&name) == 0) l.kernel = name.release;
  if (const std::optional<Affinity> own = Affinity::of_this_thread(); own.has_value()) l.n_usable_cpus = own->count();
  const std::string meminfo = files.read("proc/meminfo");
  l.memory_bytes = entry(meminfo, "MemTotal:");
  for (const GroupFiles& names : {kVersion1, kVersion2})
    for (const std::string& folder : group_folders(files, names.controller, names.folder)) {
      const int64_t bytes = files.number(format("{}/{}", folder, names.limit), -1);
      // Version 1 expresses "no limit" as a number near 2^63.
      if (bytes > 0 && bytes < int64_t{1} << 60)
        l.cgroup_bytes = std::min(l.cgroup_bytes, static_cast<uint64_t>(bytes));
    }
  struct statvfs shm = {};
  if (statvfs((root + "/dev/shm").c_str(), &shm) == 0) {
    l.has_shm = true;
    l.shm_bytes = uint64_t{shm.f_blocks} * shm.f_frsize;
    l.shm_free_bytes = uint64_t{shm.f_bavail} * shm.f_frsize;
  }
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0) l.memlock_bytes = limit_of(limit.rlim_cur);
  if (locks_without_limit(files)) l.memlock_bytes = kUnlimited;
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    l.n_files = limit_of(limit.rlim_cur);
    l.n_files_hard = limit_of(limit.rlim_max);
  }
  l.cma = try_cma();
  l.yama_scope = static_cast<int>(files.number("proc/sys/kernel/yama/ptrace_scope", -1));
  l.huge_pages_anonymous = chosen(files.read("sys/kernel/mm/transparent_hugepage/enabled"));
  l.huge_pages_shared = chosen(files.read("sys/kernel/mm/transparent_hugepage/shmem_enabled"));
  l.n_huge_pages = entry(meminfo, "HugePages_Total:");
  l.huge_page_bytes =
      static_cast<uint64_t>(std::max<int64_t>(0, files.number("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", 0)));
  l.nvidia_module = files.read("proc/driver/nvidia/version");
  l.nvidia_module = l.nvidia_module.substr(0, l.nvidia_module.find('\n'));
  const std::string modules = format("\n{}", files.read("proc/modules"));
  l.peer_memory =
      modules.find("\nnvidia_peermem ") != std::string::npos || modules.find("\nnv_peer_mem ") != std::string::npos;
  l.infiniband_dev = files.exists("dev/infiniband");
  l.mps = find_mps(root);
  return l;
}

}  // namespace moeccl::driver
