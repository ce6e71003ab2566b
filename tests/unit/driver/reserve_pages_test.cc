// SPDX-License-Identifier: Apache-2.0
// Shared memory is reserved although a timer constantly interrupts the reservation, and the file has all pages.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/time.h>

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
    Result<Fd> fd = shared_segment("moeccl-test", kBytes, true);
    ASSERT_TRUE(fd.ok()) << fd.status().message();
    struct stat st = {};
    ASSERT_EQ(fstat(fd->get(), &st), 0);
    EXPECT_EQ(static_cast<size_t>(st.st_blocks) * 512, kBytes);
  }
  EXPECT_LT(now_ns() - start, 20'000'000'000);
}

TEST(ReservePages, TellsWhatTheKernelRefuses) {
  Result<Fd> fd = shared_segment("moeccl-test", size_t{8} << 20, false);
  ASSERT_TRUE(fd.ok());
  // Larger than any file may be (EFBIG).
  const Status s = reserve_pages(*fd, size_t{1} << 62, size_t{1} << 62);
  EXPECT_FALSE(s.ok());
}

}  // namespace
}  // namespace moeccl::driver
