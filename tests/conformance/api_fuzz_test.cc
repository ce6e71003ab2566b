// SPDX-License-Identifier: Apache-2.0
// Random calls of the public interface: dead, stale and foreign handles, numbers of all kinds, groups that are left
// open, streams, forks, and threads that abort and ask for errors while owners destroy. Every call must return with a
// code that is not moecclInternalError and, when it failed, with a sentence; the sanitizers check the rest.
//
// MOECCL_TEST_SEED replays or varies the test, MOECCL_TEST_CALLS sets the number of calls of a process (a million takes
// some minutes), and MOECCL_TEST_TRACE names a file that keeps the number and kind of the last call.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "tests/conformance/api_fuzzer.h"
#include "tests/support/ranks.h"

namespace moeccl::testing {
namespace {

TEST(ApiFuzz, RandomCallsComeBackWithACodeAndASentence) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "operations on streams get buffers that other calls use meanwhile, which is a race of the caller";
#endif
  const char* given = std::getenv("MOECCL_TEST_CALLS");
  const long n_calls = given != nullptr ? std::atol(given) : scaled(100'000);
  RankOptions options{.init = false};
  options.deadline_ms = given != nullptr ? 3'000'000 : 60'000;
  const uint64_t seed = test_seed();
  run_ranks(
      1,
      [n_calls, seed](int, moecclComm_t) {
        Fuzzer fuzzer(seed);
        std::atomic<bool> stop{false};
        std::vector<std::thread> watchdogs;
        for (uint64_t i = 0; i < 2; ++i) watchdogs.emplace_back([&, i] { fuzzer.watch(seed * 2 + i, stop); });
        fuzzer.run(n_calls);
        stop = true;
        for (std::thread& t : watchdogs) t.join();
        EXPECT_GT(fuzzer.n_watched(), 0u);
        EXPECT_EQ(fuzzer.n_bad_watched(), 0u);
      },
      options);
}

}  // namespace
}  // namespace moeccl::testing
