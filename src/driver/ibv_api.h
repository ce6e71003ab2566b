// SPDX-License-Identifier: Apache-2.0
// The functions of libibverbs, which is opened on demand. The calls of the data path (post_send, poll_cq) are not here,
// because each open device has its own; see ibv_abi::ContextOps.
#pragma once

#include <string>

#include "src/base/status.h"
#include "src/driver/ibv_abi.h"

namespace moeccl::driver {

struct IbvApi {
  ibv_abi::Device** (*get_device_list)(int*);
  void (*free_device_list)(ibv_abi::Device**);
  ibv_abi::Context* (*open_device)(ibv_abi::Device*);
  int (*close_device)(ibv_abi::Context*);
  int (*query_device)(ibv_abi::Context*, ibv_abi::DeviceAttr*);
  int (*query_port)(ibv_abi::Context*, uint8_t, ibv_abi::PortAttr*);
  int (*query_gid)(ibv_abi::Context*, uint8_t, int, uint8_t*);
  ibv_abi::ProtectionDomain* (*alloc_pd)(ibv_abi::Context*);
  int (*dealloc_pd)(ibv_abi::ProtectionDomain*);
  ibv_abi::MemoryRegion* (*reg_mr)(ibv_abi::ProtectionDomain*, void*, size_t, int access);
  int (*dereg_mr)(ibv_abi::MemoryRegion*);
  ibv_abi::CompletionQueue* (*create_cq)(ibv_abi::Context*, int, void*, void*, int);
  int (*destroy_cq)(ibv_abi::CompletionQueue*);
  ibv_abi::QueuePair* (*create_qp)(ibv_abi::ProtectionDomain*, ibv_abi::QueuePairInit*);
  int (*modify_qp)(ibv_abi::QueuePair*, ibv_abi::QueuePairAttr*, int mask);
  int (*destroy_qp)(ibv_abi::QueuePair*);
  int (*get_async_event)(ibv_abi::Context*, ibv_abi::AsyncEvent*);
  void (*ack_async_event)(ibv_abi::AsyncEvent*);
  const char* (*wc_status_str)(int);
  // These are null in an older rdma-core: optional access flags need 28, types of GIDs and dma-buf need 34.
  ibv_abi::MemoryRegion* (*reg_mr_iova2)(ibv_abi::ProtectionDomain*, void*, size_t, uint64_t iova, unsigned access);
  ibv_abi::MemoryRegion* (*reg_dmabuf_mr)(ibv_abi::ProtectionDomain*, uint64_t offset, size_t, uint64_t iova, int fd,
                                          int access);
  int (*query_gid_ex)(ibv_abi::Context*, uint32_t port, uint32_t index, ibv_abi::GidEntry*, uint32_t flags,
                      size_t entry_bytes);

  int (*fork_init)();

  // `library` is a path to use instead of libibverbs.so.1. It is never closed, because providers register themselves in
  // it. Returns Unsupported when there is no such library, or when it is another library of that name.
  static Result<IbvApi> load(const std::string& library = "");
};

}  // namespace moeccl::driver
