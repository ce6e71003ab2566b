// SPDX-License-Identifier: Apache-2.0
// The shim's settings from the environment, its notices to the user, and the last error.
#pragma once

#include <moeccl/moeccl.h>

#include <cstdint>
#include <exception>
#include <string>

#include "shim/nccl/abi.h"

namespace moeccl::shim {

enum class Mode {
  kAuto,    // MoECCL, but NCCL for jobs whose memory MoECCL cannot serve
  kMoeccl,  // MoECCL whatever happens
  kNccl,    // NCCL for everything: the shim steps aside
};

inline constexpr int kNoLimitMs = INT32_MAX;  // 24 days, the longest that a moecclConfig_t can say

struct Settings {
  Mode mode = Mode::kAuto;          // MOECCL_SHIM_MODE: auto, moeccl or nccl
  std::string nccl;                 // MOECCL_SHIM_NCCL: the real library's file; empty: searched for
  bool quiet = false;               // MOECCL_SHIM_QUIET: 1 hides the notice
  int version = NCCL_VERSION_CODE;  // MOECCL_SHIM_VERSION: what ncclGetVersion says, as 2.28.9 or 22809
  int most_version = INT32_MAX;     // the same, where it is set: the most that it says where NCCL serves
  // MoECCL's own limits. NCCL has none, because ranks may come minutes apart and its programs have watchdogs of their
  // own; so the shim sets the longest where the user sets none.
  int timeout_ms = kNoLimitMs;     // MOECCL_TIMEOUT_MS, for puts and signals
  bool limits_operations = false;  // whether MOECCL_TIMEOUT_MS
  bool limits_init = false;        // and MOECCL_INIT_TIMEOUT_MS are set
};
// Reads them at the first use; values that are not understood get a line on stderr.
const Settings& settings();

// Writes "moeccl-nccl: text" to stderr unless the user asked for quiet.
void notice(const std::string& text);

// Keeps the message for ncclGetLastError, shows it when NCCL_DEBUG asks for warnings, and returns the code.
ncclResult_t fail(ncclResult_t code, const std::string& text);
// Does the same for a failed call of MoECCL, with its message for the communicator, or for this thread's last call
// without one; returns ncclSuccess for moecclSuccess.
ncclResult_t from_moeccl(moecclResult_t result, moecclComm_t comm = nullptr);
// Does the same for an exception, which nearly always means a lack of memory or threads.
ncclResult_t fail_thrown(const std::exception& thrown) noexcept;
// Runs `body` (returning ncclResult_t) so that no exception escapes.
template <class Body>
ncclResult_t contained(Body&& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return fail_thrown(e);
  }
}
// Notes that the last failure was one of the real library, which keeps its own message.
void fail_elsewhere();
bool failed_elsewhere();
// Returns the process's last failure; valid until the calling thread asks again.
const char* last_error();

}  // namespace moeccl::shim
