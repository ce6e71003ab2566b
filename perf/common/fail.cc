// SPDX-License-Identifier: Apache-2.0
#include "perf/common/fail.h"

#include <unistd.h>

#include <cstdio>
#include <mutex>
#include <utility>

namespace perf {
namespace {

std::mutex speaking;
std::function<void(const std::string&)> failure_hook;

}  // namespace

void on_failure(std::function<void(const std::string&)> hook) { failure_hook = std::move(hook); }

void fail(const std::string& sentence) {
  speaking.lock();  // never unlocked: the process ends
  std::fflush(stdout);
  std::fprintf(stderr, "# error: %s\n", sentence.c_str());
  if (failure_hook) failure_hook(sentence);
  std::fflush(nullptr);
  // Runs no destructors, because other threads may be inside the library.
  _exit(1);
}

void check(moecclResult_t result, const char* call, int rank, moecclComm_t comm) {
  if (result == moecclSuccess) return;
  const char* detail = moecclGetLastError(comm);
  if (detail[0] == '\0' && comm != nullptr) detail = moecclGetLastError(nullptr);
  const std::string who = rank < 0 ? "" : "on rank " + std::to_string(rank) + ": ";
  fail(who + call + ": " + moecclGetErrorString(result) + ": " + detail);
}

}  // namespace perf
