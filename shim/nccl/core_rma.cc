// SPDX-License-Identifier: Apache-2.0
// One-sided puts and signals (NCCL 2.29 and later), between ranks of a host.
#include <memory>
#include <vector>

#include "shim/nccl/core.h"
#include "shim/nccl/device.h"
#include "shim/nccl/windows.h"

namespace moeccl::shim {
namespace {

ncclResult_t out_of_range(const char* function, const char* name, long long value, long long most) {
  return fail(ncclInvalidArgument, std::string(function) + ": " + name + " is " + std::to_string(value) +
                                       ": give 0 to " + std::to_string(most));
}

ncclResult_t check_signal(const char* function, const Comm& comm, int peer, int signal, int context) {
  if (comm.revoked) return fail(ncclInvalidUsage, std::string(function) + ": the communicator was revoked");
  if (peer < 0 || peer >= comm.n_ranks) return out_of_range(function, "peer", peer, comm.n_ranks - 1);
  if (signal < 0 || signal >= Rma::kSignals) return out_of_range(function, "sigIdx", signal, Rma::kSignals - 1);
  if (context < 0 || context >= Rma::kContexts) return out_of_range(function, "ctx", context, Rma::kContexts - 1);
  return ncclSuccess;
}

ncclResult_t check_flags(const char* function, unsigned flags) {
  if (flags == 0) return ncclSuccess;
  return fail(ncclInvalidArgument, std::string(function) + ": flags is " + std::to_string(flags) + ": give 0");
}

// Waits for what was called on the stream before; the call then acts at once, on the calling thread. Calls on NULL have
// already finished, unless this MoECCL serves the device.
ncclResult_t finish_stream(const char* function, cudaStream_t stream) {
  if (device::synchronize(stream)) return ncclSuccess;  // a CUDA stream
  if (stream == nullptr) return ncclSuccess;
  const moecclResult_t ended = moecclStreamSynchronize(reinterpret_cast<moecclStream_t>(stream));
  if (ended == moecclSuccess) return ncclSuccess;
  return fail(from_moeccl(ended), std::string(function) + ": waiting for its stream: " + moecclGetLastError(nullptr));
}

// Runs the work now, or at the end of the thread's group. There all puts come before all waits, so that one thread may
// drive several ranks.
template <class Work>
ncclResult_t now_or_at_end(bool waits, ncclComm_t handle, const char* function, Work work) {
  const auto run = [handle, function, work = std::move(work)] {
    Target target;
    const ncclResult_t result = resolve(function, handle, &target);
    return result == ncclSuccess ? work(*target.ours) : result;
  };
  if (!group_open()) return run();
  at_group_end(waits, run);
  return ncclSuccess;
}

// The program, or a peer, may give the communicator up while this rank waits.
ncclResult_t given_up(Comm& comm, std::string* why) {
  *why = "the communicator was aborted or revoked";
  if (comm.given_up) return ncclInvalidUsage;
  moecclResult_t state = moecclSuccess;
  if (moecclCommGetAsyncError(comm.ours, &state) != moecclSuccess || state == moecclSuccess ||
      state == moecclInProgress) {
    return ncclSuccess;
  }
  *why = std::string("the communicator has failed: ") + moecclGetLastError(comm.ours);
  return from_moeccl(state, comm.ours);
}

// Device memory is copied to the host first.
ncclResult_t put_now(Comm& comm, Rma::Put put, cudaStream_t stream) {
  const device::Current on(comm.device);  // whatever the calling thread uses
  const ncclResult_t ready = finish_stream(put.function, stream);
  if (ready != ncclSuccess) return ready;
  std::vector<std::byte> copy;
  if (put.n_bytes > 0 && device::owns(put.bytes)) {
    copy.resize(put.n_bytes);
    // A stream of MoECCL's has just been waited for.
    if (!device::read(copy.data(), put.bytes, put.n_bytes, device::may_be_stream(stream) ? stream : nullptr))
      return fail(ncclUnhandledCudaError, std::string(put.function) + ": localbuff cannot be read from its device");
    put.bytes = copy.data();
  }
  return comm.rma.put(put, [&comm](std::string* why) { return given_up(comm, why); });
}

}  // namespace

namespace core {

ncclResult_t PutSignal(const void* send, size_t count, ncclDataType_t type, int peer, ncclWindow_t window,
                       size_t offset, int signal, int context, unsigned int flags, ncclComm_t comm,
                       cudaStream_t stream) {
  constexpr const char* kName = "ncclPutSignal";
  MOECCL_OURS_OR_FAIL_GROUP(target, comm, Need::kUsable, PutSignal, send, count, type, peer, window, offset, signal,
                            context, flags, target.real, stream);
  ncclResult_t result = check_signal(kName, *target.ours, peer, signal, context);
  if (result == ncclSuccess) result = check_flags(kName, flags);
  if (result != ncclSuccess) return fail_group(result);
  const size_t element = moecclTypeSize(static_cast<moecclDataType_t>(type));
  if (element == 0 || count > SIZE_MAX / element) {
    return fail_group(fail(ncclInvalidArgument, "ncclPutSignal: datatype is " + std::to_string(type) + " and count " +
                                                    std::to_string(count) + ": give a type, and what memory can hold"));
  }
  if (send == nullptr && count > 0) return fail_group(fail(ncclInvalidArgument, "ncclPutSignal: localbuff is NULL"));
  Rma::Put put{.function = kName,
               .peer = peer,
               .signal = signal,
               .context = context,
               .bytes = send,
               .n_bytes = count * element,
               .offset = offset};
  if (!find_window(window, comm, &put.window)) {
    return fail_group(fail(ncclInvalidArgument, "ncclPutSignal: peerWin is no window of this communicator"));
  }
  if (put.window == Rma::kNoWindow) {
    return fail_group(
        fail(ncclInvalidUsage, "ncclPutSignal: peerWin was registered beside " + std::to_string(Rma::kWindows) +
                                   " other windows of this communicator, or there is no memory to share: deregister "
                                   "windows first, or make another communicator for it"));
  }
  return now_or_at_end(false, comm, kName, [put, stream](Comm& c) { return put_now(c, put, stream); });
}

ncclResult_t Signal(int peer, int signal, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream) {
  constexpr const char* kName = "ncclSignal";
  MOECCL_OURS_OR_FAIL_GROUP(target, comm, Need::kUsable, Signal, peer, signal, context, flags, target.real, stream);
  ncclResult_t result = check_signal(kName, *target.ours, peer, signal, context);
  if (result == ncclSuccess) result = check_flags(kName, flags);
  if (result != ncclSuccess) return fail_group(result);
  const Rma::Put put{.function = kName, .peer = peer, .signal = signal, .context = context};
  return now_or_at_end(false, comm, kName, [put, stream](Comm& c) { return put_now(c, put, stream); });
}

ncclResult_t WaitSignal(int n_signals, ncclWaitSignalDesc_t* signals, ncclComm_t comm, cudaStream_t stream) {
  constexpr const char* kName = "ncclWaitSignal";
  MOECCL_OURS_OR_FAIL_GROUP(target, comm, Need::kUsable, WaitSignal, n_signals, signals, target.real, stream);
  if (n_signals < 0 || (n_signals > 0 && signals == nullptr)) {
    return fail_group(fail(ncclInvalidArgument, "ncclWaitSignal: nDesc is " + std::to_string(n_signals) +
                                                    (signals == nullptr ? " and signalDescs is NULL" : "") +
                                                    ": give an array of so many descriptors"));
  }
  std::vector<ncclWaitSignalDesc_t> all(signals, signals + n_signals);
  for (const ncclWaitSignalDesc_t& s : all) {
    ncclResult_t result = check_signal(kName, *target.ours, s.peer, s.sigIdx, s.ctx);
    if (result == ncclSuccess && s.opCnt < 0) result = out_of_range(kName, "opCnt", s.opCnt, INT_MAX);
    if (result != ncclSuccess) return fail_group(result);
  }
  return now_or_at_end(true, comm, kName, [all = std::move(all), stream](Comm& c) {
    const device::Current on(c.device);
    const ncclResult_t ready = finish_stream("ncclWaitSignal", stream);
    if (ready != ncclSuccess) return ready;
    return c.rma.wait(all, [&c](std::string* why) { return given_up(c, why); });
  });
}

}  // namespace core
}  // namespace moeccl::shim
