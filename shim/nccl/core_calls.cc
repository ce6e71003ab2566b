// Collectives and messages: each becomes a Call.
#include "shim/nccl/core.h"
#include "shim/nccl/group.h"

namespace moeccl::shim::core {

ncclResult_t AllReduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                       cudaStream_t stream) {
  return submit({.kind = Kind::kAllReduce,
                 .function = "ncclAllReduce",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .op = op,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t Reduce(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                    ncclComm_t comm, cudaStream_t stream) {
  return submit({.kind = Kind::kReduce,
                 .function = "ncclReduce",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .op = op,
                 .peer = root,
                 .comm = comm,
                 .stream = stream});
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
  return submit({.kind = Kind::kBroadcast,
                 .function = "ncclBroadcast",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t AllGather(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                       cudaStream_t stream) {
  return submit({.kind = Kind::kAllGather,
                 .function = "ncclAllGather",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t ReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return submit({.kind = Kind::kReduceScatter,
                 .function = "ncclReduceScatter",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .op = op,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t AlltoAll(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                      cudaStream_t stream) {
  return submit({.kind = Kind::kAllToAll,
                 .function = "ncclAlltoAll",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t Gather(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                    cudaStream_t stream) {
  return submit({.kind = Kind::kGather,
                 .function = "ncclGather",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream});
}

ncclResult_t Scatter(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                     cudaStream_t stream) {
  return submit({.kind = Kind::kScatter,
                 .function = "ncclScatter",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream});
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
