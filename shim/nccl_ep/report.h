// SPDX-License-Identifier: Apache-2.0
// Errors of this library, and the NCCL shim that it stands on.
#pragma once

#include <moeccl/moeccl.h>

#include <exception>
#include <string>

#include "shim/nccl/hooks.h"
#include "shim/nccl_ep/abi.h"

namespace moeccl::shim::ep {

// Returns what the program's NCCL, if that is MoECCL's shim, tells of its handles; otherwise null, with the reason in
// *why (may be null).
const moecclNcclHooks* hooks(std::string* why = nullptr);

// Keeps the message for ncclGetLastError, or writes it to stderr without the shim, and returns the code.
ncclResult_t fail(ncclResult_t code, const std::string& text);
// Does the same for a failed call of MoECCL on this thread, and says what an all-reduce among other ranks' calls means
// (Handle::refuse); returns ncclSuccess for moecclSuccess.
ncclResult_t from_moeccl(moecclResult_t result);

// Runs `body` (returning ncclResult_t) so that no exception escapes.
template <class Body>
ncclResult_t contained(Body&& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return fail(ncclSystemError, std::string("the process has no memory left: ") + e.what());
  }
}

}  // namespace moeccl::shim::ep

#define MOECCL_EP_TRY(call) \
  if (const ncclResult_t result_ = (call); result_ != ncclSuccess) return result_
