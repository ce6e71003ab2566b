// SPDX-License-Identifier: Apache-2.0
// Collectives and messages: each becomes a Call, whose fields are given in their order. Also operators with a scalar.
#include "shim/nccl/core.h"
#include "shim/nccl/device.h"

namespace moeccl::shim::core {

// A plain collective calls its form with a config, and gives none.
#define NCCL_COLLECTIVE(name, ours, op, root, parameters, arguments)                                    \
  ncclResult_t name##Config NCCL_WITH_CONFIG parameters {                                               \
    const char* const function = config == nullptr ? "nccl" #name : "nccl" #name "Config";              \
    return submit({moecclOp##ours, function, send, recv, count, type, op, root, comm, stream}, config); \
  }                                                                                                     \
  ncclResult_t name parameters {                                                                        \
    const ncclCollConfig_t* const config = nullptr;                                                     \
    return name##Config NCCL_AND_CONFIG arguments;                                                      \
  }
#include "shim/nccl/collectives.def"

ncclResult_t Bcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
  return submit({moecclOpBroadcast, "ncclBcast", buffer, buffer, count, type, ncclSum, root, comm, stream});
}

ncclResult_t Send(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({moecclOpSendRecv, "ncclSend", send, nullptr, count, type, ncclSum, peer, comm, stream, true});
}

ncclResult_t Recv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
  return submit({moecclOpSendRecv, "ncclRecv", nullptr, recv, count, type, ncclSum, peer, comm, stream});
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
