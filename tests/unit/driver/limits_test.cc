// SPDX-License-Identifier: Apache-2.0
#include "src/driver/limits.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>

namespace {

bool no_reads = false;  // as where a seccomp profile forbids process_vm_readv

}  // namespace

extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long n_local, const iovec* remote,
                                    unsigned long n_remote, unsigned long flags) noexcept {
  if (no_reads) return errno = EPERM, -1;
  return syscall(SYS_process_vm_readv, pid, local, n_local, remote, n_remote, flags);
}

namespace moeccl::driver {
namespace {

// The files of another machine.
class Limits : public ::testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = root_ + "/" + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }
  bool has(uint64_t bytes) const { return control_groups_have(bytes, root_).ok(); }

  const std::string root_ = ::testing::TempDir() + "moeccl_limits_" + std::to_string(getpid());
};

TEST_F(Limits, AControlGroupHasWhatItsLimitLeaves) {
  EXPECT_TRUE(has(1 << 30)) << "no groups at all";
  write("proc/self/cgroup", "4:memory:/old\n1:cpu:/old\n0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/step/memory.current", "900\n");
  EXPECT_TRUE(has(1 << 30));
  write("sys/fs/cgroup/job/memory.max", "1000\n");  // of the group around it
  write("sys/fs/cgroup/job/memory.current", "900\n");
  EXPECT_TRUE(has(100));
  const Status s = control_groups_have(101, root_);
  EXPECT_EQ(s.code(), moecclOutOfMemory);
  for (const char* part : {"may use 1000 bytes", "cgroup/job/memory.max", "has 100 left"})
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message();
  write("sys/fs/cgroup/job/memory.stat", "anon 600\nactive_file 30\ninactive_file 20\n");
  EXPECT_TRUE(has(150));
  EXPECT_FALSE(has(151));
  write("proc/meminfo", "MemTotal: 64 kB\nSwapFree: 1 kB\n");
  EXPECT_TRUE(has(1174));
  write("sys/fs/cgroup/job/memory.swap.max", "50\n");
  write("sys/fs/cgroup/job/memory.swap.current", "40\n");
  EXPECT_TRUE(has(160));
  EXPECT_FALSE(has(161));
  // Version 1, of which a container sees its own group at the top.
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "990\n");
  write("sys/fs/cgroup/memory/memory.stat", "active_file 1\ntotal_active_file 5\ntotal_inactive_file 5\n");
  write("proc/meminfo", "SwapFree: 0 kB\n");
  EXPECT_TRUE(has(20));
  EXPECT_FALSE(has(21));
}

TEST_F(Limits, AHostHasWhatIsAvailableAndItsSwap) {
  EXPECT_TRUE(host_has(uint64_t{1} << 50, root_).ok()) << "nothing is known";
  write("proc/meminfo", "MemTotal: 64 kB\nMemFree: 2 kB\nMemAvailable: 8 kB\nSwapFree: 1 kB\n");
  EXPECT_TRUE(host_has(9 << 10, root_).ok());
  const Status s = host_has((9 << 10) + 1, root_);
  EXPECT_EQ(s.code(), moecclOutOfMemory);
  EXPECT_NE(s.message().find("the host has 8192 available, and 1024 of swap"), std::string::npos) << s.message();
}

TEST_F(Limits, WhatIsLeftIsTheLeastOfAllLimits) {
  EXPECT_EQ(memory_left(root_), kUnlimited);
  write("proc/meminfo", "MemAvailable: 8 kB\nSwapFree: 1 kB\n");
  EXPECT_EQ(memory_left(root_), 9u << 10);
  write("proc/self/cgroup", "0::/job/step\n");
  write("sys/fs/cgroup/job/step/memory.max", "max\n");
  write("sys/fs/cgroup/job/memory.max", "4000\n");
  write("sys/fs/cgroup/job/memory.current", "3000\n");
  write("sys/fs/cgroup/job/memory.swap.max", "0\n");
  EXPECT_EQ(memory_left(root_), 1000u);
  write("sys/fs/cgroup/job/memory.stat", "inactive_file 500\n");
  EXPECT_EQ(memory_left(root_), 1500u);
  write("sys/fs/cgroup/job/memory.current", "9000\n");  // as after the limit was lowered
  EXPECT_EQ(memory_left(root_), 0u);
}

TEST_F(Limits, LockedMemoryIsLimitedWhereThereIsRdma) {
  EXPECT_EQ(lockable_left(root_), kUnlimited);
  write("dev/infiniband/uverbs0", "");
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &before), 0);
  rlimit now = before;
  now.rlim_cur = std::min<rlim_t>(1 << 20, before.rlim_max);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &now), 0);
  EXPECT_EQ(lockable_left(root_), now.rlim_cur);
  write("proc/self/status", "VmPin:\t      16 kB\n");
  EXPECT_EQ(lockable_left(root_), now.rlim_cur - (16 << 10));
  write("proc/self/uid_map", "         0          0 4294967295\n");
  write("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
  EXPECT_EQ(lockable_left(root_), kUnlimited);
  ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &before), 0);
}

TEST_F(Limits, ACpuQuotaCountsAsThatManyProcessors) {
  EXPECT_EQ(cpu_quota(root_), 0u);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(cpu_quota(root_), 0u);
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "250000\n");
  EXPECT_EQ(cpu_quota(root_), 2u);
  write("sys/fs/cgroup/cpu.max", "max 100000\n");
  write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(cpu_quota(root_), 0u);
  write("sys/fs/cgroup/cpu.max", "400000 100000\n");
  EXPECT_EQ(cpu_quota(root_), 4u);
  write("sys/fs/cgroup/cpu.max", "50000 100000\n");
  EXPECT_EQ(cpu_quota(root_), 1u);
}

// Slurm and systemd limit a group somewhere between the top and the process's own.
TEST_F(Limits, TheLeastLimitOfAllGroupsAroundTheProcessCounts) {
  write("proc/self/cgroup", "0::/job/step/task\n");
  write("sys/fs/cgroup/job/step/cpu.max", "300000 100000\n");
  write("sys/fs/cgroup/job/cpu.max", "800000 100000\n");
  write("sys/fs/cgroup/job/step/task/memory.max", "max\n");
  write("sys/fs/cgroup/job/step/memory.max", "3000\n");
  write("sys/fs/cgroup/job/memory.max", "8000\n");
  EXPECT_EQ(cpu_quota(root_), 3u);
  EXPECT_EQ(host_limits(root_).cgroup_bytes, 3000u);
  write("proc/self/cgroup", "9:cpu,cpuacct:/old/one\n4:memory:/old\n");
  EXPECT_EQ(cpu_quota(root_), 0u) << "another process's groups";
  write("sys/fs/cgroup/cpu/old/one/cpu.cfs_quota_us", "200000\n");
  write("sys/fs/cgroup/cpu/old/one/cpu.cfs_period_us", "100000\n");
  write("sys/fs/cgroup/memory/old/memory.limit_in_bytes", "2000\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(cpu_quota(root_), 2u);
  EXPECT_EQ(host_limits(root_).cgroup_bytes, 2000u);
}

TEST_F(Limits, ACapabilityLocksMemoryWithoutLimit) {
  if (host_limits(root_).memlock_bytes == kUnlimited) GTEST_SKIP() << "this process has no limit";
  write("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000\n");
  EXPECT_NE(host_limits(root_).memlock_bytes, kUnlimited) << "no user namespace is known";
  write("proc/self/uid_map", "         0       1000          1\n");
  EXPECT_NE(host_limits(root_).memlock_bytes, kUnlimited) << "a capability of a user namespace";
  write("proc/self/uid_map", "         0          0 4294967295\n");
  EXPECT_EQ(host_limits(root_).memlock_bytes, kUnlimited);
  write("proc/self/status", "Name:\tx\nCapEff:\t0000000000003fff\n");
  EXPECT_NE(host_limits(root_).memlock_bytes, kUnlimited);
}

TEST_F(Limits, HugePagesHaveTheirSize) {
  EXPECT_EQ(host_limits(root_).huge_page_bytes, 0u);
  write("sys/kernel/mm/transparent_hugepage/hpage_pmd_size", "536870912\n");
  EXPECT_EQ(host_limits(root_).huge_page_bytes, uint64_t{512} << 20);
}

// The kernel then reaps the children, and how they ended is lost.
TEST_F(Limits, RefusedReadsAreSeenWhereSigchldIsIgnored) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGCHLD, SIG_IGN);
    if (!host_limits(root_).cma.ok()) _exit(1);
    no_reads = true;
    _exit(host_limits(root_).cma.ok() ? 2 : 0);
  }
  int how = -1;
  ASSERT_EQ(waitpid(child, &how, 0), child);
  ASSERT_TRUE(WIFEXITED(how));
  if (WEXITSTATUS(how) == 1) GTEST_SKIP() << "reads between processes are not allowed here";
  EXPECT_EQ(WEXITSTATUS(how), 0);
}

}  // namespace
}  // namespace moeccl::driver
