// SPDX-License-Identifier: Apache-2.0
// Collectives and messages: each becomes a Call, whose fields are given in their order. A plain collective calls its
// form with a config (NCCL 2.31 and later), and gives none. Also operators with a scalar.
#include "shim/nccl/core.h"
#include "shim/nccl/device.h"

namespace moeccl::shim::core {

#define NAME(name) config == nullptr ? "nccl" #name : "nccl" #name "Config"
ncclResult_t AllReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kAllReduce, NAME(AllReduce), send, recv, count, type, op, 0, comm, stream}, config);
}
ncclResult_t AllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                       cudaStream_t stream) {
  return AllReduceConfig(send, recv, count, type, op, comm, stream, nullptr);
}

ncclResult_t ReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                          ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kReduce, NAME(Reduce), send, recv, count, type, op, root, comm, stream}, config);
}
ncclResult_t Reduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                    ncclComm_t comm, cudaStream_t stream) {
  return ReduceConfig(send, recv, count, type, op, root, comm, stream, nullptr);
}

ncclResult_t BroadcastConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                             cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kBroadcast, NAME(Broadcast), send, recv, count, type, ncclSum, root, comm, stream}, config);
}
ncclResult_t Broadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return BroadcastConfig(send, recv, count, type, root, comm, stream, nullptr);
}

ncclResult_t AllGatherConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                             cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kAllGather, NAME(AllGather), send, recv, count, type, ncclSum, 0, comm, stream}, config);
}
ncclResult_t AllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                       cudaStream_t stream) {
  return AllGatherConfig(send, recv, count, type, comm, stream, nullptr);
}

ncclResult_t ReduceScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kReduceScatter, NAME(ReduceScatter), send, recv, count, type, op, 0, comm, stream}, config);
}
ncclResult_t ReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return ReduceScatterConfig(send, recv, count, type, op, comm, stream, nullptr);
}

ncclResult_t AlltoAllConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                            cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kAllToAll, NAME(AlltoAll), send, recv, count, type, ncclSum, 0, comm, stream}, config);
}
ncclResult_t AlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                      cudaStream_t stream) {
  return AlltoAllConfig(send, recv, count, type, comm, stream, nullptr);
}

ncclResult_t GatherConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                          cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kGather, NAME(Gather), send, recv, count, type, ncclSum, root, comm, stream}, config);
}
ncclResult_t Gather(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                    cudaStream_t stream) {
  return GatherConfig(send, recv, count, type, root, comm, stream, nullptr);
}

ncclResult_t ScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({Kind::kScatter, NAME(Scatter), send, recv, count, type, ncclSum, root, comm, stream}, config);
}
ncclResult_t Scatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                     cudaStream_t stream) {
  return ScatterConfig(send, recv, count, type, root, comm, stream, nullptr);
}
#undef NAME

ncclResult_t Bcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit({Kind::kBroadcast, "ncclBcast", buffer, buffer, count, type, ncclSum, root, comm, stream});
}

ncclResult_t Send(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({Kind::kSend, "ncclSend", send, nullptr, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t Recv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({Kind::kRecv, "ncclRecv", nullptr, recv, count, type, ncclSum, peer, comm, stream});
}

ncclResult_t RedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                  ncclComm_t comm) {
  if (op == nullptr || scalar == nullptr) {
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: op or scalar is NULL: give addresses");
  }
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate) {
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: residence is " + std::to_string(residence) +
                                         ": give ncclScalarDevice or ncclScalarHostImmediate");
  }
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kUsable, RedOpCreatePreMulSum, op, scalar, type, residence, target.real);
  Comm::PreMul made{.used = true, .type = type};
  if (residence == ncclScalarDevice && !device::names(scalar)) {
    if (moecclTypeSize(static_cast<moecclDataType_t>(type)) == 0) {
      return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: datatype is " + std::to_string(type) + ": give one");
    }
    made.scalar = scalar;
  } else {
    const ncclResult_t result = from_moeccl(
        moecclRedOpCreatePreMulSum(&made.made, scalar, static_cast<moecclDataType_t>(type), target.ours->ours));
    if (result != ncclSuccess) return result;
  }
  Comm& c = *target.ours;
  const std::lock_guard lock(c.mutex);
  size_t i = 0;
  while (i < c.premuls.size() && c.premuls[i].used) ++i;
  if (i == c.premuls.size()) c.premuls.emplace_back();
  c.premuls[i] = made;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(i));
  return ncclSuccess;
}

ncclResult_t RedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  Target target;
  const ncclResult_t result = resolve("ncclRedOpDestroy", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) {
    if (!group_open()) return MOECCL_FORWARD(RedOpDestroy, op, target.real);
    after_group([op, real = target.real] { (void)MOECCL_FORWARD(RedOpDestroy, op, real); });  // its calls are kept too
    return ncclSuccess;
  }
  const auto i = static_cast<size_t>(op) - ncclNumOps;
  {
    const std::lock_guard lock(target.ours->mutex);
    if (op < ncclNumOps || i >= target.ours->premuls.size() || !target.ours->premuls[i].used) {
      return fail(ncclInvalidArgument,
                  "ncclRedOpDestroy: op is " + std::to_string(op) + ": give a live one of this communicator");
    }
  }
  // Calls of an open group still need the operator, so it is destroyed after them.
  after_group([handle = comm, i] {
    const Held c = hold(handle);
    if (!c) return;
    const std::lock_guard lock(c->mutex);
    if (c->premuls[i].scalar == nullptr) (void)moecclRedOpDestroy(c->premuls[i].made, c->ours);
    c->premuls[i].used = false;
  });
  return ncclSuccess;
}

}  // namespace moeccl::shim::core
