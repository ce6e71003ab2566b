// SPDX-License-Identifier: Apache-2.0
// Entry points of collectives.h.
#include "moeccl/collectives.h"
#include "moeccl/pipeline.h"

#include <cstdint>

#include "src/api/issue.h"
#include "src/comm/collective.h"
#include "src/comm/tensor_blocks_call.h"
#include "src/exec/task.h"

// The preloaded MPI shim has this function (shim/mpi/entry.c); null elsewhere. It lets MPI make progress, and is called
// only within calls on kAlone. A caller that could pass it instead could pass any address.
extern "C" __attribute__((weak, visibility("default"))) void moecclMpiProgress(void);

using namespace moeccl;
using comm::CollectiveCall;
using comm::Communicator;

namespace {

// A call on this stream runs at once, as on NULL, and is never part of the thread's group. For the MPI shim, because a
// program that opens a group does not know its MPI calls to be MoECCL's. No stream has this handle: generations begin
// with 1.
const auto kAlone = reinterpret_cast<moecclStream_t>(uintptr_t{0xC2});

// A communicator from before a fork is detected later, by a check that each operation makes anyway.
moecclResult_t unknown(moecclComm_t handle) {
  Communicator* none = nullptr;
  return api::member_of_group(api::finish(api::find_comm(handle, &none)));
}

moecclResult_t collective(const CollectiveCall& call, moecclComm_t comm_handle, moecclStream_t stream_handle) {
  Communicator* comm = api::CommTable::get().find(comm_handle);
  if (comm == nullptr) return unknown(comm_handle);
  if (stream_handle == kAlone) {
    const exec::WhileWaiting elsewhere(moecclMpiProgress);
    return api::guarded(comm, [&] { return comm::run_collective(*comm, call); });
  }
  return api::member_of_group(api::guarded(comm, [&]() -> Status {
    if (stream_handle == nullptr && !comm::Group::open_here()) return comm::run_collective(*comm, call);
    return api::issue(*comm, stream_handle, nullptr,
                      [&](exec::Operation& op) { return comm::prepare_collective(*comm, call, op); });
  }));
}

moecclResult_t message(const void* data, size_t count, moecclDataType_t type, int peer, bool is_send,
                       moecclComm_t comm_handle, moecclStream_t stream_handle) {
  Communicator* comm = api::CommTable::get().find(comm_handle);
  if (comm == nullptr) return unknown(comm_handle);
  return api::member_of_group(api::guarded(comm, [&]() -> Status {
    comm::Call made{.comm = comm};
    MOECCL_ASSIGN_OR_RETURN(made.stream, api::find_stream(stream_handle, comm));
    MOECCL_TRY(comm::or_break_off(*comm, made.stream,
                                  comm::prepare_message(*comm, data, count, type, peer, is_send, made.message)));
    return comm::issue(std::move(made));
  }));
}

}  // namespace

moecclResult_t moecclAllReduce(const void* send, void* recv, size_t count, moecclDataType_t type, moecclRedOp_t op,
                               moecclComm_t comm, moecclStream_t stream) {
  return collective({.op = moecclOpAllReduce, .send = send, .recv = recv, .count = count, .type = type, .reduce = op},
                    comm, stream);
}

moecclResult_t moecclTensorAllToAll(const void* send, void* recv, size_t count, moecclDataType_t type,
                                    moecclComm_t comm, moecclStream_t stream) {
  return collective({.op = moecclOpTensorAllToAll, .send = send, .recv = recv, .count = count, .type = type}, comm,
                    stream);
}

moecclResult_t moecclTensorAllToAllv(const void* send, void* recv, const size_t* counts, moecclDataType_t type,
                                     moecclComm_t comm_handle, moecclStream_t stream) {
  return api::collective(comm_handle, [&](Communicator& comm) {
    return api::issue(comm, stream, nullptr, [&](exec::Operation& op) {
      return comm::prepare_tensor_blocks(comm, {send, recv, counts, type}, op);
    });
  });
}

moecclResult_t moecclReduce(const void* send, void* recv, size_t count, moecclDataType_t type, moecclRedOp_t op,
                            int root, moecclComm_t comm, moecclStream_t stream) {
  return collective(
      {.op = moecclOpReduce, .send = send, .recv = recv, .count = count, .type = type, .reduce = op, .root = root},
      comm, stream);
}

moecclResult_t moecclBroadcast(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                               moecclComm_t comm, moecclStream_t stream) {
  return collective({.op = moecclOpBroadcast, .send = send, .recv = recv, .count = count, .type = type, .root = root},
                    comm, stream);
}

moecclResult_t moecclAllGather(const void* send, void* recv, size_t count, moecclDataType_t type, moecclComm_t comm,
                               moecclStream_t stream) {
  return collective({.op = moecclOpAllGather, .send = send, .recv = recv, .count = count, .type = type}, comm, stream);
}

moecclResult_t moecclReduceScatter(const void* send, void* recv, size_t count, moecclDataType_t type, moecclRedOp_t op,
                                   moecclComm_t comm, moecclStream_t stream) {
  return collective(
      {.op = moecclOpReduceScatter, .send = send, .recv = recv, .count = count, .type = type, .reduce = op}, comm,
      stream);
}

moecclResult_t moecclAllToAll(const void* send, void* recv, size_t count, moecclDataType_t type, moecclComm_t comm,
                              moecclStream_t stream) {
  return collective({.op = moecclOpAllToAll, .send = send, .recv = recv, .count = count, .type = type}, comm, stream);
}

moecclResult_t moecclAllToAllv(const void* send, const size_t* send_counts, const size_t* send_displs, void* recv,
                               const size_t* recv_counts, const size_t* recv_displs, moecclDataType_t type,
                               moecclComm_t comm, moecclStream_t stream) {
  return collective({.op = moecclOpAllToAllv,
                     .send = send,
                     .recv = recv,
                     .type = type,
                     .send_counts = send_counts,
                     .send_displs = send_displs,
                     .recv_counts = recv_counts,
                     .recv_displs = recv_displs},
                    comm, stream);
}

moecclResult_t moecclGather(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                            moecclComm_t comm, moecclStream_t stream) {
  return collective({.op = moecclOpGather, .send = send, .recv = recv, .count = count, .type = type, .root = root},
                    comm, stream);
}

moecclResult_t moecclScatter(const void* send, void* recv, size_t count, moecclDataType_t type, int root,
                             moecclComm_t comm, moecclStream_t stream) {
  return collective({.op = moecclOpScatter, .send = send, .recv = recv, .count = count, .type = type, .root = root},
                    comm, stream);
}

moecclResult_t moecclSend(const void* send, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                          moecclStream_t stream) {
  return message(send, count, type, peer, true, comm, stream);
}

moecclResult_t moecclRecv(void* recv, size_t count, moecclDataType_t type, int peer, moecclComm_t comm,
                          moecclStream_t stream) {
  return message(recv, count, type, peer, false, comm, stream);
}
