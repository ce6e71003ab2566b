// SPDX-License-Identifier: Apache-2.0
// The real NCCL, when this machine has one. It is found, opened beside the shim and never mixed with it.
#pragma once

#include <string>

#include "shim/nccl/settings.h"
#include "shim/nccl/table.h"

namespace moeccl::shim {

struct Real {
  std::string path;
  int version = 0;            // NCCL_VERSION_CODE of the library
  moecclNcclTable call = {};  // functions that its version does not have are null
};

// Returns the library, which the first call opens; null when there is none, with the reason in *why (may be null).
const Real* real_nccl(std::string* why = nullptr);
// Returns the library if it is open already.
const Real* real_if_open();

// Marks that the calling thread is inside the real library: a call that the library makes by a public name of NCCL is
// the library's own business and goes straight back to it.
class InReal {
 public:
  InReal() : before_(depth_++) {}
  ~InReal() { depth_ = before_; }
  InReal(const InReal&) = delete;
  InReal& operator=(const InReal&) = delete;
  static bool now() { return depth_ > 0; }

 private:
  static thread_local int depth_;
  int before_;
};

// Calls one function of the real library, or reports which one it lacks.
template <class F, class... A>
ncclResult_t forward(const char* name, F moecclNcclTable::*member, A... arguments) {
  std::string why;
  const Real* real = real_nccl(&why);
  if (real == nullptr) return fail(ncclInvalidUsage, std::string("nccl") + name + " has to go to NCCL, but " + why);
  if (real->call.*member == nullptr) {
    return fail(ncclInvalidUsage, real->path + " (version " + std::to_string(real->version) + ") has no nccl" + name +
                                      ": install NCCL 2.28 or newer");
  }
  const InReal inside;
  const ncclResult_t result = (real->call.*member)(arguments...);
  if (result != ncclSuccess && result != ncclInProgress) fail_elsewhere();
  return result;
}
#define MOECCL_FORWARD(name, ...) ::moeccl::shim::forward(#name, &moecclNcclTable::name __VA_OPT__(, ) __VA_ARGS__)

}  // namespace moeccl::shim
