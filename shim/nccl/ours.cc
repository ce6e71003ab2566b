// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/ours.h"

#include <moeccl/moeccl.h>

#include <string>

#include "shim/nccl/device.h"

namespace moeccl::shim {
namespace {

// Tries a communicator of one rank, and a sum on device memory in a CUDA stream. A MoECCL that knows no CUDA refuses
// the stream before it touches the memory; one without kernels for this device refuses the memory. Returns the reason
// why it does not work, or nothing if it does.
std::string try_cuda() {
  const device::Probe probe;
  if (!probe.ok()) return "no memory or stream could be had on the device";
  const auto why = [](moecclComm_t comm) {
    const char* text = moecclGetLastError(comm);
    return text != nullptr && *text != '\0' ? std::string(text) : "a sum on the device failed";
  };
  moecclUniqueId id;
  moecclComm_t comm = nullptr;
  if (moecclGetUniqueId(&id) != moecclSuccess || moecclCommInitRank(&comm, 1, id, 0) != moecclSuccess)
    return why(nullptr);
  auto* stream = reinterpret_cast<moecclStream_t>(probe.stream());
  std::string reason;
  if (moecclAllReduce(probe.word(), probe.word(), 1, moecclInt64, moecclSum, comm, stream) != moecclSuccess)
    reason = why(comm);
  else if (!probe.synchronize())
    reason = "the device failed";
  if (moecclCommDestroy(comm) != moecclSuccess && reason.empty()) reason = why(nullptr);
  return reason;
}

}  // namespace

const std::string& why_not_cuda() {
  static const std::string why = device::present() ? try_cuda() : "there is no CUDA device";
  return why;
}

bool moeccl_serves_cuda() { return why_not_cuda().empty(); }

}  // namespace moeccl::shim
