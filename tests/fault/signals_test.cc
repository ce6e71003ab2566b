// SPDX-License-Identifier: Apache-2.0
// Signals that the application uses: operations survive them at 1 kHz, and the library installs no handlers (scoreboard
// line 18).
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <atomic>
#include <memory>
#include <string>

#include "tests/fault/random_worker.h"
#include "tests/support/hosts.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

std::atomic<uint64_t> n_signals{0};

// Raises SIGALRM a thousand times a second in each process, without SA_RESTART, so that waiting calls end with EINTR.
void run_with_signals(TestHosts* hosts) {
  RankOptions options{.mode = RankMode::kProcesses};
  options.hosts = hosts;
  run_ranks(
      3,
      [](int rank, moecclComm_t comm) {
        struct sigaction act = {};
        act.sa_handler = [](int) { n_signals++; };
        ASSERT_EQ(sigaction(SIGALRM, &act, nullptr), 0);
        const itimerval often = {{0, 1000}, {0, 1000}};
        ASSERT_EQ(setitimer(ITIMER_REAL, &often, nullptr), 0);
        Worker worker({.n = 3, .heap = false, .seed = test_seed()}, rank, comm);
        for (uint64_t it = 1; it <= 400; ++it)
          ASSERT_EQ(worker.step(it), moecclSuccess) << worker.name() << " #" << it << ": " << moecclGetLastError(comm);
        const itimerval never = {};
        setitimer(ITIMER_REAL, &never, nullptr);
        EXPECT_EQ(worker.wrong(), 0u) << worker.what();
        EXPECT_GT(n_signals, 0u);
      },
      options);
}

TEST(Signals, AreSurvivedOnOneHost) { run_with_signals(nullptr); }

TEST(Signals, AreSurvivedBetweenHosts) {
  std::string why;
  const auto hosts = TestHosts::create({.weights = {2, 1}, .named = true}, &why);
  ASSERT_NE(hosts, nullptr) << why;
  run_with_signals(hosts.get());
}

TEST(Signals, HandlersOfTheProcessAreItsOwn) {
  run_ranks(2,
            [](int, moecclComm_t comm) {
              int32_t in = 1, out = 0;
              ASSERT_EQ(moecclAllReduce(&in, &out, 1, moecclInt32, moecclSum, comm, nullptr), moecclSuccess);
              for (const int number : {SIGPIPE, SIGCHLD, SIGUSR1, SIGUSR2, SIGSEGV, SIGBUS, SIGTERM, SIGINT}) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
                if (number == SIGSEGV || number == SIGBUS) continue;  // the sanitizer's own handlers
#endif
                struct sigaction now = {};
                ASSERT_EQ(sigaction(number, nullptr, &now), 0);
                EXPECT_EQ(now.sa_handler, SIG_DFL) << "signal " << number;
              }
            },
            {.mode = RankMode::kProcesses});
}

}  // namespace
}  // namespace moeccl::testing
