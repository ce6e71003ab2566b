// SPDX-License-Identifier: Apache-2.0
// Collectives with or without their own config (NCCL 2.31 and later), and what else 2.32 has added.
#include "shim/nccl/core.h"
#include "shim/nccl/group.h"
#include "shim/nccl/join.h"
#include "shim/nccl/real.h"

namespace moeccl::shim::core {

ncclResult_t AllReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kAllReduce,
                 .function = config == nullptr ? "ncclAllReduce" : "ncclAllReduceConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .op = op,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t ReduceConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                          ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kReduce,
                 .function = config == nullptr ? "ncclReduce" : "ncclReduceConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .op = op,
                 .peer = root,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t BroadcastConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                             cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kBroadcast,
                 .function = config == nullptr ? "ncclBroadcast" : "ncclBroadcastConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t AllGatherConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                             cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kAllGather,
                 .function = config == nullptr ? "ncclAllGather" : "ncclAllGatherConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t ReduceScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kReduceScatter,
                 .function = config == nullptr ? "ncclReduceScatter" : "ncclReduceScatterConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .op = op,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t AlltoAllConfig(const void* send, void* recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                            cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kAllToAll,
                 .function = config == nullptr ? "ncclAlltoAll" : "ncclAlltoAllConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t GatherConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                          cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kGather,
                 .function = config == nullptr ? "ncclGather" : "ncclGatherConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream},
                config);
}

ncclResult_t ScatterConfig(const void* send, void* recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream, const ncclCollConfig_t* config) {
  return submit({.kind = Kind::kScatter,
                 .function = config == nullptr ? "ncclScatter" : "ncclScatterConfig",
                 .send = send,
                 .recv = recv,
                 .count = count,
                 .type = type,
                 .peer = root,
                 .comm = comm,
                 .stream = stream},
                config);
}

// The secret is for NCCL's sockets. MoECCL's are authenticated by the id's own key, and encrypted when the user says so
// on all ranks. A program that asks for encryption must not believe that it has it otherwise.
ncclResult_t SetEncryption(const ncclEncryptionConfig_t* config) {
  if (config == nullptr || config->magic != NCCL_CONFIG_MAGIC || config->size < sizeof *config) {
    return fail(ncclInvalidArgument,
                "ncclSetEncryption: assign NCCL_ENCRYPTION_CONFIG_INITIALIZER to its argument first");
  }
  std::string reason;
  if (wants_nccl(&reason)) return MOECCL_FORWARD(SetEncryption, config);
  if (config->mode == NCCL_ENCRYPTION_MODE_NONE) return ncclSuccess;
  if (config->mode != NCCL_ENCRYPTION_MODE_PSK) {
    return fail(ncclInvalidArgument, "ncclSetEncryption: mode is " + std::to_string(config->mode) +
                                         ": give NCCL_ENCRYPTION_MODE_NONE or NCCL_ENCRYPTION_MODE_PSK");
  }
  if (encryption_is_asked()) return ncclSuccess;
  return fail(
      ncclInvalidUsage,
      "ncclSetEncryption: MoECCL encrypts what hosts send each other when MOECCL_ENCRYPT is 1 on all ranks: set "
      "it, or run this program with MOECCL_SHIM_MODE=nccl");
}

}  // namespace moeccl::shim::core
