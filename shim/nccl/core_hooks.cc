// SPDX-License-Identifier: Apache-2.0
// What other libraries of MoECCL ask this shim (hooks.h).
#include "shim/nccl/core.h"
#include "shim/nccl/hooks.h"
#include "shim/nccl/ours.h"

namespace moeccl::shim {
namespace {

ncclResult_t member(const char* function, ncclComm_t comm, moecclNcclMember* out) {
  return contained([&] {
    Target target;
    const ncclResult_t resolved = resolve(function, comm, &target);
    if (resolved != ncclSuccess) return resolved;
    if (target.real != nullptr)
      return fail(ncclInvalidUsage,
                  std::string(function) +
                      ": NCCL serves this communicator, and MoECCL's libnccl_ep.so.0 works on those of "
                      "MoECCL: run with MOECCL_SHIM_MODE=moeccl, or with NVIDIA's libnccl_ep.so.0");
    *out = {target.ours->ours, target.ours->rank, target.ours->n_ranks, target.ours->shares_device ? 1 : 0};
    return ncclSuccess;
  });
}

ncclResult_t window(ncclComm_t comm, ncclWindow_t window, void** memory) {
  return contained([&] { return core::WinGetUserPtr(comm, window, memory); });
}

int serves_cuda() { return moeccl_serves_cuda() ? 1 : 0; }
ncclResult_t fail_with(ncclResult_t code, const char* text) { return fail(code, text); }
ncclResult_t failed(int result) { return from_moeccl(static_cast<moecclResult_t>(result)); }

}  // namespace

extern const moecclNcclHooks kHooks;
const moecclNcclHooks kHooks = {sizeof(moecclNcclHooks), member, serves_cuda, window, fail_with, failed};

}  // namespace moeccl::shim
