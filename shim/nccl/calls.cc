// SPDX-License-Identifier: Apache-2.0
// Hands one call to MoECCL or to NCCL.
#include "shim/nccl/device.h"
#include "shim/nccl/group.h"
#include "shim/nccl/ours.h"
#include "shim/nccl/real.h"

namespace moeccl::shim {
namespace {

bool reduces(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter; }

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

moecclResult_t run_ours(const Call& c, moecclRedOp_t op, const Comm& in) {
  const auto type = static_cast<moecclDataType_t>(c.type);
  const moecclComm_t comm = in.ours;
  moecclStream_t stream = stream_of(c, in);
  switch (c.kind) {
    case Kind::kAllReduce:
      return moecclAllReduce(c.send, c.recv, c.count, type, op, comm, stream);
    case Kind::kReduce:
      return moecclReduce(c.send, c.recv, c.count, type, op, c.peer, comm, stream);
    case Kind::kBroadcast:
      return moecclBroadcast(c.send, c.recv, c.count, type, c.peer, comm, stream);
    case Kind::kAllGather:
      return moecclAllGather(c.send, c.recv, c.count, type, comm, stream);
    case Kind::kReduceScatter:
      return moecclReduceScatter(c.send, c.recv, c.count, type, op, comm, stream);
    case Kind::kAllToAll:
      return moecclAllToAll(c.send, c.recv, c.count, type, comm, stream);
    case Kind::kGather:
      return moecclGather(c.send, c.recv, c.count, type, c.peer, comm, stream);
    case Kind::kScatter:
      return moecclScatter(c.send, c.recv, c.count, type, c.peer, comm, stream);
    case Kind::kSend:
      return moecclSend(c.send, c.count, type, c.peer, comm, stream);
    case Kind::kRecv:
      break;
  }
  return moecclRecv(c.recv, c.count, type, c.peer, comm, stream);
}

}  // namespace

moecclOp_t op_of(Kind kind) {
  switch (kind) {
    case Kind::kAllReduce:
      return moecclOpAllReduce;
    case Kind::kReduce:
      return moecclOpReduce;
    case Kind::kBroadcast:
      return moecclOpBroadcast;
    case Kind::kAllGather:
      return moecclOpAllGather;
    case Kind::kReduceScatter:
      return moecclOpReduceScatter;
    case Kind::kAllToAll:
      return moecclOpAllToAll;
    case Kind::kGather:
      return moecclOpGather;
    case Kind::kScatter:
      return moecclOpScatter;
    case Kind::kSend:
    case Kind::kRecv:
      break;
  }
  return moecclOpSendRecv;
}

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

namespace {

ncclResult_t issue_real_config(const Call& c, ncclComm_t comm) {
  const ncclCollConfig_t* config = c.config->given();
  switch (c.kind) {
    case Kind::kAllReduce:
      return MOECCL_FORWARD(AllReduceConfig, c.send, c.recv, c.count, c.type, c.op, comm, c.stream, config);
    case Kind::kReduce:
      return MOECCL_FORWARD(ReduceConfig, c.send, c.recv, c.count, c.type, c.op, c.peer, comm, c.stream, config);
    case Kind::kBroadcast:
      return MOECCL_FORWARD(BroadcastConfig, c.send, c.recv, c.count, c.type, c.peer, comm, c.stream, config);
    case Kind::kAllGather:
      return MOECCL_FORWARD(AllGatherConfig, c.send, c.recv, c.count, c.type, comm, c.stream, config);
    case Kind::kReduceScatter:
      return MOECCL_FORWARD(ReduceScatterConfig, c.send, c.recv, c.count, c.type, c.op, comm, c.stream, config);
    case Kind::kAllToAll:
      return MOECCL_FORWARD(AlltoAllConfig, c.send, c.recv, c.count, c.type, comm, c.stream, config);
    case Kind::kGather:
      return MOECCL_FORWARD(GatherConfig, c.send, c.recv, c.count, c.type, c.peer, comm, c.stream, config);
    case Kind::kScatter:
      return MOECCL_FORWARD(ScatterConfig, c.send, c.recv, c.count, c.type, c.peer, comm, c.stream, config);
    case Kind::kSend:
    case Kind::kRecv:
      break;
  }
  return fail(ncclInternalError, std::string(c.function) + ": messages have no config");
}

}  // namespace

ncclResult_t issue_real(const Call& c, ncclComm_t comm) {
  if (c.config != nullptr) return issue_real_config(c, comm);
  switch (c.kind) {
    case Kind::kAllReduce:
      return MOECCL_FORWARD(AllReduce, c.send, c.recv, c.count, c.type, c.op, comm, c.stream);
    case Kind::kReduce:
      return MOECCL_FORWARD(Reduce, c.send, c.recv, c.count, c.type, c.op, c.peer, comm, c.stream);
    case Kind::kBroadcast:
      return MOECCL_FORWARD(Broadcast, c.send, c.recv, c.count, c.type, c.peer, comm, c.stream);
    case Kind::kAllGather:
      return MOECCL_FORWARD(AllGather, c.send, c.recv, c.count, c.type, comm, c.stream);
    case Kind::kReduceScatter:
      return MOECCL_FORWARD(ReduceScatter, c.send, c.recv, c.count, c.type, c.op, comm, c.stream);
    case Kind::kAllToAll:
      return MOECCL_FORWARD(AlltoAll, c.send, c.recv, c.count, c.type, comm, c.stream);
    case Kind::kGather:
      return MOECCL_FORWARD(Gather, c.send, c.recv, c.count, c.type, c.peer, comm, c.stream);
    case Kind::kScatter:
      return MOECCL_FORWARD(Scatter, c.send, c.recv, c.count, c.type, c.peer, comm, c.stream);
    case Kind::kSend:
      return MOECCL_FORWARD(Send, c.send, c.count, c.type, c.peer, comm, c.stream);
    case Kind::kRecv:
      break;
  }
  return MOECCL_FORWARD(Recv, c.recv, c.count, c.type, c.peer, comm, c.stream);
}

double predict_us(const Call& call, Comm& comm) {
  if (choose_algorithm(call, comm) != ncclSuccess) return 0;
  moecclPlanInfo_t info = {};
  info.size = sizeof info;
  const moecclResult_t result =
      moecclPlanQuery(comm.ours, op_of(call.kind), call.count, static_cast<moecclDataType_t>(call.type), &info);
  return result == moecclSuccess ? info.predicted_us : 0;
}

}  // namespace moeccl::shim
