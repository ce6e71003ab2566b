// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/ours.h"

#include <moeccl/moeccl.h>

#include "shim/nccl/device.h"

namespace moeccl::shim {
namespace {

// Tries a communicator of one rank, and a sum on device memory in a CUDA stream. A MoECCL that knows no CUDA refuses
// the stream before it touches the memory; one without kernels for this device refuses the memory.
bool try_cuda() {
  const device::Probe probe;
  if (!probe.ok()) return false;
  moecclUniqueId id;
  moecclComm_t comm = nullptr;
  if (moecclGetUniqueId(&id) != moecclSuccess || moecclCommInitRank(&comm, 1, id, 0) != moecclSuccess) return false;
  auto* stream = reinterpret_cast<moecclStream_t>(probe.stream());
  const bool works =
      moecclAllReduce(probe.word(), probe.word(), 1, moecclInt64, moecclSum, comm, stream) == moecclSuccess &&
      probe.synchronize();
  return moecclCommDestroy(comm) == moecclSuccess && works;
}

}  // namespace

bool moeccl_serves_cuda() {
  static const bool serves = device::present() && try_cuda();
  return serves;
}

}  // namespace moeccl::shim
