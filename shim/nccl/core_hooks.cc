// SPDX-License-Identifier: Apache-2.0
// What other libraries of MoECCL ask this shim (hooks.h).
#include <memory>
#include <utility>

#include "shim/nccl/core.h"
#include "shim/nccl/hooks.h"
#include "shim/nccl/ours.h"

namespace moeccl::shim {
namespace {

ncclResult_t hold_ours(const char* function, ncclComm_t comm, Held* held) {
  Target target;
  const ncclResult_t resolved = resolve(function, comm, &target);
  if (resolved != ncclSuccess) return resolved;
  if (target.real != nullptr)
    return fail(ncclInvalidUsage, std::string(function) +
                                      ": NCCL serves this communicator, and MoECCL's libnccl_ep.so.0 works on those of "
                                      "MoECCL: run with MOECCL_SHIM_MODE=moeccl, or with NVIDIA's libnccl_ep.so.0");
  *held = std::move(target.ours);
  return ncclSuccess;
}

ncclResult_t member(const char* function, ncclComm_t comm, moecclNcclMember* out) {
  return contained([&] {
    Held c;
    const ncclResult_t result = hold_ours(function, comm, &c);
    if (result != ncclSuccess) return result;
    *out = {c->ours, c->rank, c->n_ranks, c->shares_device ? 1 : 0, moeccl_serves_cuda() ? c->device : -1};
    return ncclSuccess;
  });
}

ncclResult_t enter(const char* function, ncclComm_t comm, void** held) {
  return contained([&] {
    auto kept = std::make_unique<Held>();
    const ncclResult_t result = hold_ours(function, comm, kept.get());
    if (result == ncclSuccess) *held = kept.release();
    return result;
  });
}

void leave(void* held) { delete static_cast<Held*>(held); }

ncclResult_t window(ncclComm_t comm, ncclWindow_t window, void** memory) {
  return contained([&] { return core::WinGetUserPtr(comm, window, memory); });
}

int serves_cuda() { return moeccl_serves_cuda() ? 1 : 0; }
ncclResult_t fail_with(ncclResult_t code, const char* text) { return fail(code, text); }
ncclResult_t failed(int result) { return from_moeccl(static_cast<moecclResult_t>(result)); }

}  // namespace

extern const moecclNcclHooks kHooks;
const moecclNcclHooks kHooks = {sizeof(moecclNcclHooks), member, serves_cuda, window, fail_with, failed, enter, leave};

}  // namespace moeccl::shim
