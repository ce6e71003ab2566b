// SPDX-License-Identifier: Apache-2.0
// Time limits that hold on a busy machine, and a port that is free on it.
// A test of "within 1 s" is about the library, not about who else uses the
// machine, so three things are taken out of it:
// - A small process beside the test sleeps 2 ms again and again; how much later it wakes is time in which this machine
//   ran nobody here (a stopped or stolen virtual machine, a stop by signal). fair_now_ms() does not count it.
// - MOECCL_TEST_PATIENCE multiplies limits. 1 by default, which is what the issues ask; tools/test sets 3, because
//   others may use its machine and ranks outnumber its cores.
// - Sanitizers slow everything down: another factor of 5.
#pragma once

#include <cstdint>

namespace moeccl::tests {

// CLOCK_MONOTONIC, the same in all processes.
int64_t now_ms();
// The same without the time in which the machine was late; only differences mean anything. The same in a test's process
// and all processes that it forked.
int64_t fair_now_ms();

// What multiplies the limits: MOECCL_TEST_PATIENCE, and 5 under sanitizers.
double patience();
// A limit, multiplied. Also for timeouts that are expected not to pass.
int64_t patient_ms(int64_t limit_ms);
// A communicator's timeout that only guards against hanging, cut to MOECCL_TIMEOUT_MS where that is set:
// tools/gpu-check has less time for a whole step.
int32_t capped_ms(int32_t timeout_ms);

// A TCP port of 127.0.0.1 that nobody listened at a moment ago, from outside the range that the kernel gives to others.
int free_port();

class Stopwatch {
 public:
  Stopwatch() : began_ms_(now_ms()), fair_began_ms_(fair_now_ms()) {}
  int64_t ms() const { return now_ms() - began_ms_; }
  int64_t fair_ms() const { return fair_now_ms() - fair_began_ms_; }

 private:
  int64_t began_ms_, fair_began_ms_;
};

}  // namespace moeccl::tests

// It took at most `limit_ms`, see above. For a Stopwatch.
#define MOECCL_EXPECT_WITHIN(watch, limit_ms) \
  EXPECT_LE((watch).fair_ms(), ::moeccl::tests::patient_ms(limit_ms)) << "it took " << (watch).ms() << " ms"
