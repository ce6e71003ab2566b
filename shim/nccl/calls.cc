// SPDX-License-Identifier: Apache-2.0
// Hands one call to MoECCL or to NCCL.
#include "shim/nccl/device.h"
#include "shim/nccl/group.h"
#include "shim/nccl/ours.h"
#include "shim/nccl/real.h"

namespace moeccl::shim {
namespace {

bool reduces(moecclOp_t kind) {
  return kind == moecclOpAllReduce || kind == moecclOpReduce || kind == moecclOpReduceScatter;
}

// MoECCL's streams are opaque handles as well, so the number is passed through. NULL blocks in MoECCL, but for NCCL it
// is the legacy default stream, on which PyTorch's synchronous collectives run. Ranks that are threads of one process
// on one device share this stream: one rank's operation would wait there for another's that comes after it, so for them
// NULL blocks. Page-locked host memory takes part in the stream's order too: a copy into it may be there.
moecclStream_t stream_of(const Call& call, const Comm& comm) {
  constexpr uintptr_t kLegacy = 1;  // CU_STREAM_LEGACY
  if (call.stream != nullptr || !moeccl_serves_cuda() || !(device::knows(call.send) || device::knows(call.recv)))
    return reinterpret_cast<moecclStream_t>(call.stream);
  if (!comm.shares_device) return reinterpret_cast<moecclStream_t>(kLegacy);
  // MoECCL puts such a call after the stream's earlier work only if its buffers are device memory.
  if (!device::names(call.send) && !device::names(call.recv)) (void)device::synchronize(nullptr);
  return nullptr;
}

// A host that reads device memory crashes, so report an error instead.
ncclResult_t check_memory(const Call& call) {
  if (moeccl_serves_cuda() || !device::present()) return ncclSuccess;
  for (const void* pointer : {call.send, static_cast<const void*>(call.recv)}) {
    if (!device::owns(pointer)) continue;
    return fail(ncclInvalidUsage, std::string(call.function) +
                                      ": the buffer is memory of a CUDA device, this MoECCL serves host memory (" +
                                      why_not_cuda() +
                                      "), and the communicator was not handed to NCCL: let the shim find NCCL "
                                      "(MOECCL_SHIM_NCCL=<file>) and leave MOECCL_SHIM_MODE at auto");
  }
  return ncclSuccess;
}

// MoECCL's operator for one call. An ncclScalarDevice scalar in memory that the host can read is read now, into an
// operator for this call alone; MoECCL itself reads one in device memory when the operation runs.
class Operator {
 public:
  Operator(const Call& call, Comm& comm) : comm_(comm) {
    op = static_cast<moecclRedOp_t>(call.op);
    if (!reduces(call.kind) || call.op < ncclNumOps) return;
    const auto i = static_cast<size_t>(call.op) - ncclNumOps;
    Comm::PreMul entry;
    {
      const std::lock_guard lock(comm.mutex);
      if (i < comm.premuls.size()) entry = comm.premuls[i];
    }
    if (!entry.used) {
      result = fail(ncclInvalidArgument, std::string(call.function) + ": op is " + std::to_string(call.op) +
                                             ": give a built-in operator or a live one of this communicator");
      return;
    }
    op = entry.made;
    if (entry.scalar == nullptr) return;
    result = from_moeccl(
        moecclRedOpCreatePreMulSum(&op, entry.scalar, static_cast<moecclDataType_t>(entry.type), comm.ours));
    made_ = result == ncclSuccess;
  }
  ~Operator() {
    if (made_) (void)moecclRedOpDestroy(op, comm_.ours);
  }
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  moecclRedOp_t op = moecclSum;
  ncclResult_t result = ncclSuccess;

 private:
  Comm& comm_;
  bool made_ = false;
};

// The collectives: (MoECCL's name, NCCL's name, their arguments).
#define COLLECTIVES(DO)                                                             \
  DO(AllReduce, AllReduce, c.send, c.recv, c.count, type, op, comm, stream)         \
  DO(Reduce, Reduce, c.send, c.recv, c.count, type, op, c.peer, comm, stream)       \
  DO(Broadcast, Broadcast, c.send, c.recv, c.count, type, c.peer, comm, stream)     \
  DO(AllGather, AllGather, c.send, c.recv, c.count, type, comm, stream)             \
  DO(ReduceScatter, ReduceScatter, c.send, c.recv, c.count, type, op, comm, stream) \
  DO(AllToAll, AlltoAll, c.send, c.recv, c.count, type, comm, stream)               \
  DO(Gather, Gather, c.send, c.recv, c.count, type, c.peer, comm, stream)           \
  DO(Scatter, Scatter, c.send, c.recv, c.count, type, c.peer, comm, stream)

moecclResult_t run_ours(const Call& c, moecclRedOp_t op, const Comm& in) {
  const auto type = static_cast<moecclDataType_t>(c.type);
  const moecclComm_t comm = in.ours;
  const moecclStream_t stream = stream_of(c, in);
#define RUN(ours, nccls, ...) \
  case moecclOp##ours:        \
    return moeccl##ours(__VA_ARGS__);
  switch (c.kind) {
    COLLECTIVES(RUN)
    default:  // a message
      break;
  }
#undef RUN
  if (c.sends) return moecclSend(c.send, c.count, type, c.peer, comm, stream);
  return moecclRecv(c.recv, c.count, type, c.peer, comm, stream);
}

}  // namespace

ncclResult_t issue_ours(const Call& call, Comm& comm) {
  if (comm.revoked) {
    return fail(ncclInvalidUsage, std::string(call.function) + ": the communicator was revoked: shrink or split it");
  }
  const ncclResult_t memory = check_memory(call);
  if (memory != ncclSuccess) return memory;
  ncclResult_t ready = choose_algorithm(call, comm);
  if (ready == ncclSuccess) ready = record_event(call);
  if (ready != ncclSuccess) return ready;
  const Operator op(call, comm);
  if (op.result != ncclSuccess) return op.result;
  return from_moeccl(run_ours(call, op.op, comm));
}

ncclResult_t issue_real(const Call& c, ncclComm_t comm) {
  const ncclDataType_t type = c.type;
  const ncclRedOp_t op = c.op;
  const cudaStream_t stream = c.stream;
  const ncclCollConfig_t* const config = c.config != nullptr ? c.config->given() : nullptr;
#define FORWARD(ours, nccls, ...) \
  case moecclOp##ours:            \
    return config == nullptr ? MOECCL_FORWARD(nccls, __VA_ARGS__) : MOECCL_FORWARD(nccls##Config, __VA_ARGS__, config);
  switch (c.kind) {
    COLLECTIVES(FORWARD)
    default:  // a message
      break;
  }
#undef FORWARD
  if (c.sends) return MOECCL_FORWARD(Send, c.send, c.count, type, c.peer, comm, stream);
  return MOECCL_FORWARD(Recv, c.recv, c.count, type, c.peer, comm, stream);
}

double predict_us(const Call& call, Comm& comm) {
  if (choose_algorithm(call, comm) != ncclSuccess) return 0;
  moecclPlanInfo_t info = {};
  info.size = sizeof info;
  const moecclResult_t result =
      moecclPlanQuery(comm.ours, call.kind, call.count, static_cast<moecclDataType_t>(call.type), &info);
  return result == moecclSuccess ? info.predicted_us : 0;
}

}  // namespace moeccl::shim
