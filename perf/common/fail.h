// SPDX-License-Identifier: Apache-2.0
// How a perf program fails: at once, with one sentence, without waiting for other ranks.
#ifndef PERF_COMMON_FAIL_H_
#define PERF_COMMON_FAIL_H_

#include <moeccl/types.h>

#include <functional>
#include <string>

namespace perf {

// Sets a function that is called with the sentence before the process ends, to write a report. Call it before ranks
// start.
void on_failure(std::function<void(const std::string&)> hook);

// Prints the sentence and ends the process with status 1. If several threads fail, only the first one prints.
[[noreturn]] void fail(const std::string& sentence);

// Fails with the library's sentence unless the result is success. rank -1: not known yet.
void check(moecclResult_t result, const char* call, int rank = -1, moecclComm_t comm = nullptr);

}  // namespace perf

#endif  // PERF_COMMON_FAIL_H_
