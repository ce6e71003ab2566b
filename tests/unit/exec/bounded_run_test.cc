// SPDX-License-Identifier: Apache-2.0
// Work that a caller waits for only so long.
#include "src/exec/bounded_run.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "tests/support/timing.h"

namespace moeccl::exec {
namespace {

using tests::patient_ms;
using tests::Stopwatch;

TEST(BoundedRun, ReturnsAfterItsTimeAndTheWorkStillEnds) {
  auto may_go_on = std::make_shared<std::promise<void>>();
  auto ended = std::make_shared<std::promise<void>>();
  std::future<void> has_ended = ended->get_future();
  const Stopwatch watch;
  bounded_run(50'000'000, [may_go_on, ended] {
    may_go_on->get_future().wait();
    ended->set_value();
  });
  EXPECT_GE(watch.ms(), 49);
  MOECCL_EXPECT_WITHIN(watch, 1000);
  EXPECT_EQ(has_ended.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  may_go_on->set_value();
  EXPECT_EQ(has_ended.wait_for(std::chrono::milliseconds(patient_ms(5000))), std::future_status::ready);
}

TEST(BoundedRun, ReturnsAsSoonAsTheWorkHasEnded) {
  bool done = false;
  const Stopwatch watch;
  bounded_run(int64_t{3600} * 1'000'000'000, [&] { done = true; });
  EXPECT_TRUE(done);
  MOECCL_EXPECT_WITHIN(watch, 1000);
}

TEST(BoundedRun, TheCallerWorksWhereNoThreadCanBeStarted) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(static_cast<unsigned>(patient_ms(10'000) / 1000));
    // The limit does not hold for the superuser.
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setresuid(kNobody, kNobody, kNobody) != 0) ::_exit(3);
    const rlimit none = {0, 0};
    if (::setrlimit(RLIMIT_NPROC, &none) != 0) ::_exit(4);
    std::thread::id worker;
    bounded_run(1, [&] { worker = std::this_thread::get_id(); });
    ::_exit(worker == std::this_thread::get_id() ? 0 : 5);
  }
  int state = 0;
  ASSERT_EQ(::waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state));
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

}  // namespace
}  // namespace moeccl::exec
