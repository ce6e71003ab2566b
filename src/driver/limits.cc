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
#include <cstdlib>
#include <optional>

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

// The kernel looks for this capability in the first user namespace only, which maps all users to themselves.
bool locks_without_limit(const Sysfs& files) {
  constexpr int kIpcLock = 14;  // CAP_IPC_LOCK
  const std::string status = files.read("proc/self/status"), mark = "\nCapEff:";
  const size_t at = status.find(mark);
  return at != std::string::npos && files.read("proc/self/uid_map").ends_with(" 4294967295") &&
         (std::strtoull(status.c_str() + at + mark.size(), nullptr, 16) >> kIpcLock & 1) != 0;
}

}  // namespace

uint64_t lockable_left(const std::string& root) {
  const Sysfs files(root.empty() ? "/" : root);
  rlimit limit = {};
  if (!files.exists("dev/infiniband") || locks_without_limit(files) || getrlimit(RLIMIT_MEMLOCK, &limit) != 0)
    return kUnlimited;
  const uint64_t most = limit_of(limit.rlim_cur), pinned = entry(files.read("proc/self/status"), "VmPin:");
  return most == kUnlimited ? most : most - std::min(most, pinned);
}

uint64_t file_bytes_limit() {
  rlimit limit = {};
  return getrlimit(RLIMIT_FSIZE, &limit) == 0 ? limit_of(limit.rlim_cur) : kUnlimited;
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
  l.cgroup_bytes = memory_limit(root);
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
