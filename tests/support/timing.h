// SPDX-License-Identifier: Apache-2.0
// Time limits that hold on a busy machine, and a port that is free on it. A test of "within 1 s" is about the library,
// not about the other load of the machine, so three effects are taken out of it:
// - A small process beside the test sleeps 2 ms again and again. The time by which it wakes too late is time in which
//   this machine ran no process here (a stopped or stolen virtual machine, a stop by signal). fair_now_ms() does not
//   count it.
// - MOECCL_TEST_PATIENCE multiplies limits. The default of 1 is what the issues ask. tools/test sets 3, because others
//   may use its machine and ranks outnumber its cores.
// - Sanitizers slow everything down: another factor of 5.
#pragma once

#include <cstdint>

namespace moeccl::tests {

// Returns CLOCK_MONOTONIC, the same in all processes.
int64_t now_ms();
// Returns the time without the periods in which the machine was late, so only differences mean anything. It is the same
// in a test's process and all processes that it forked.
int64_t fair_now_ms();

// Returns whether this program was built with a sanitizer, which needs memory and addresses of its own. Ask this, and
// not the scale, whether a test can run at all: CI reduces the scale without a sanitizer.
bool sanitized();
// Returns the factor of the limits: MOECCL_TEST_PATIENCE, times 5 under sanitizers.
double patience();
// Returns a limit times that factor. Also for timeouts that are expected not to pass.
int64_t patient_ms(int64_t limit_ms);
// Returns a communicator's timeout that only guards against hanging, cut to MOECCL_TIMEOUT_MS where that is set:
// tools/gpu-check has less time for a whole step.
int32_t capped_ms(int32_t timeout_ms);

// Returns a TCP port of 127.0.0.1 that was not in use a moment ago, from outside the range that the kernel assigns.
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

// Expects that a Stopwatch shows at most `limit_ms`, see above.
#define MOECCL_EXPECT_WITHIN(watch, limit_ms) \
  EXPECT_LE((watch).fair_ms(), ::moeccl::tests::patient_ms(limit_ms)) << "it took " << (watch).ms() << " ms"
