// SPDX-License-Identifier: Apache-2.0
// Collectives and messages: each becomes a Call. A plain collective calls its form with a config (core_config.cc), and
// gives none.
#include "shim/nccl/core.h"
#include "shim/nccl/group.h"

namespace moeccl::shim::core {

ncclResult_t AllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                       cudaStream_t stream) {
  return AllReduceConfig(send, recv, count, type, op, comm, stream, nullptr);
}

ncclResult_t Reduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                    ncclComm_t comm, cudaStream_t stream) {
  return ReduceConfig(send, recv, count, type, op, root, comm, stream, nullptr);
}

ncclResult_t Bcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit({.kind = Kind::kBroadcast,
                 .function = "ncclBcast",
                 .send = buffer,
                 .recv = buffer,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t Broadcast(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  return BroadcastConfig(send, recv, count, type, root, comm, stream, nullptr);
}

ncclResult_t AllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                       cudaStream_t stream) {
  return AllGatherConfig(send, recv, count, type, comm, stream, nullptr);
}

ncclResult_t ReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return ReduceScatterConfig(send, recv, count, type, op, comm, stream, nullptr);
}

ncclResult_t AlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                      cudaStream_t stream) {
  return AlltoAllConfig(send, recv, count, type, comm, stream, nullptr);
}

ncclResult_t Gather(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                    cudaStream_t stream) {
  return GatherConfig(send, recv, count, type, root, comm, stream, nullptr);
}

ncclResult_t Scatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                     cudaStream_t stream) {
  return ScatterConfig(send, recv, count, type, root, comm, stream, nullptr);
}

ncclResult_t Send(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({.kind = Kind::kSend,
                 .function = "ncclSend",
                 .send = send,
                 .count = count,
                 .type = type,
                 .peer = peer,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t Recv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({.kind = Kind::kRecv,
                 .function = "ncclRecv",
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = peer,
                 .comm = comm,
                 .stream = stream});
}

}  // namespace moeccl::shim::core
