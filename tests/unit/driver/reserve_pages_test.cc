// SPDX-License-Identifier: Apache-2.0
// Shared memory is reserved although a timer constantly interrupts the reservation, and the file has all pages.
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "src/base/clock.h"
#include "src/driver/memory.h"

namespace moeccl::driver {
namespace {

// Raises a signal every `us` microseconds, without restart, until the end of the scope.
class Timer {
 public:
  explicit Timer(long us) {
    struct sigaction act = {};
    act.sa_handler = [](int) {};
    sigaction(SIGALRM, &act, &before_);
    const itimerval often{{0, us}, {0, us}};
    setitimer(ITIMER_REAL, &often, nullptr);
  }
  ~Timer() {
    const itimerval never{};
    setitimer(ITIMER_REAL, &never, nullptr);
    sigaction(SIGALRM, &before_, nullptr);
  }

 private:
  struct sigaction before_;
};

TEST(ReservePages, EndsAlthoughSignalsInterruptIt) {
  constexpr size_t kBytes = size_t{64} << 20;  // longer than the timer's period, so that no single call completes
  const int64_t start = now_ns();
  {
    const Timer timer(1000);
    Result<Fd> fd = shared_segment("moeccl-test", kBytes);
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    const Status s = reserve_pages(*fd, 0, kBytes);
    ASSERT_TRUE(s.ok()) << s.message();
    struct stat st = {};
    ASSERT_EQ(fstat(fd->get(), &st), 0);
    EXPECT_EQ(static_cast<size_t>(st.st_blocks) * 512, kBytes);
  }
  EXPECT_LT(now_ns() - start, 20'000'000'000);
}

// The kernel would kill a process of the group instead.
TEST(ReservePages, NeedsRoomInTheControlGroup) {
  const pid_t child = fork();
  if (child == 0) {
    // In place of the real files, those of a group, in both versions, that has 1 MiB left.
    if (unshare(CLONE_NEWNS) != 0 || mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("none", "/sys/fs/cgroup", "tmpfs", 0, nullptr) != 0 || mkdir("/sys/fs/cgroup/memory", 0755) != 0)
      _exit(77);
    for (const std::string folder : {"/sys/fs/cgroup/", "/sys/fs/cgroup/memory/"}) {
      for (const char* name : {"memory.max", "memory.limit_in_bytes"}) std::ofstream(folder + name) << (64 << 20);
      for (const char* name : {"memory.current", "memory.usage_in_bytes"}) std::ofstream(folder + name) << (63 << 20);
      std::ofstream(folder + "memory.swap.max") << 0;
    }
    constexpr size_t kBytes = size_t{8} << 20;
    const Result<Fd> fd = shared_segment("moeccl-test", kBytes);
    if (!fd.ok()) _exit(1);
    if (reserve_pages(*fd, 0, kBytes).code() != moecclOutOfMemory) _exit(2);
    if (reserve_huge_pages(*fd, Mapping(), 0, kBytes).code() != moecclOutOfMemory) _exit(3);
    _exit(reserve_pages(*fd, 0, size_t{1} << 20).ok() ? 0 : 4);
  }
  int status = -1;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "this user may not mount";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ReservePages, TellsWhatTheKernelRefuses) {
  Result<Fd> fd = shared_segment("moeccl-test", size_t{8} << 20);
  ASSERT_TRUE(fd.ok());
  // Larger than any file may be (EFBIG).
  const Status s = reserve_pages(*fd, size_t{1} << 62, size_t{1} << 62);
  EXPECT_FALSE(s.ok());
}

}  // namespace
}  // namespace moeccl::driver
