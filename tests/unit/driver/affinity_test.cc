// SPDX-License-Identifier: Apache-2.0
// Machines that may have more processors than cpu_set_t has room for.
#include "src/driver/affinity.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "src/driver/limits.h"
#include "src/driver/thread.h"

namespace {

size_t shortest_mask = 0;  // bytes; a kernel for 2048 processors refuses masks of less than 256

}  // namespace

extern "C" int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t* set) noexcept {
  if (bytes < shortest_mask) return errno = EINVAL, -1;
  return syscall(SYS_sched_getaffinity, pid, bytes, set) < 0 ? -1 : 0;
}

namespace moeccl::driver {
namespace {

TEST(Affinity, KernelsForManyProcessorsAreAsked) {
  const CoreSet before = usable_cores();
  const uint32_t n = Affinity::of_this_thread()->count();
  EXPECT_GT(n, 0u);
  shortest_mask = 256;
  EXPECT_EQ(usable_cores(), before);
  EXPECT_EQ(host_limits("/nonexistent").n_usable_cpus, n);
  uint32_t asked = 0;
  move_to_core([&](int) { return ++asked == 0; });
  EXPECT_EQ(asked, n);
  shortest_mask = 0;
}

TEST(Affinity, AThreadIsBoundToOneAndToAll) {
  const auto before = Affinity::of_this_thread();
  ASSERT_TRUE(before.has_value());
  int cpu = 0;
  while (!before->holds(cpu)) ++cpu;
  ASSERT_TRUE(Affinity::only(cpu).bind());
  EXPECT_EQ(Affinity::of_this_thread()->count(), 1u);
  EXPECT_FALSE(Affinity().bind()) << "nothing";
  EXPECT_TRUE(Affinity::all().bind());
  EXPECT_TRUE(Affinity::of_this_thread()->holds(cpu));
  EXPECT_TRUE(before->bind());
}

}  // namespace
}  // namespace moeccl::driver
