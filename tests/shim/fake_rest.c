/* SPDX-License-Identifier: Apache-2.0 */
/* Every function of NCCL, as a weak symbol. Those that fake_nccl.c does not define count their calls and fail, which is
 * their mark. */
#include "shim/nccl/table.h"

void fake_count(const char* name);

#define REST(result, name, parameters, arguments, failure)                    \
  __attribute__((weak, visibility("default"))) result nccl##name parameters { \
    fake_count(#name);                                                        \
    return failure;                                                           \
  }
#define NCCL_DEVICE_FUNCTION REST
#define NCCL_FUNCTION REST
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wpedantic" /* `return (void)0` */
#include "shim/nccl/functions.def"

__attribute__((weak, visibility("default"))) ncclResult_t ncclAllToAll(const void* send, void* recv, size_t count,
                                                                       ncclDataType_t type, ncclComm_t comm,
                                                                       cudaStream_t stream) {
  return ncclAlltoAll(send, recv, count, type, comm, stream);
}
