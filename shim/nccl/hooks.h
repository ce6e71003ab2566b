/* SPDX-License-Identifier: Apache-2.0 */
/* What this shim tells another library of MoECCL that is written for NCCL's users (shim/nccl_ep): what stands behind
 * the program's handles. No interface for programs. */
#ifndef MOECCL_SHIM_NCCL_HOOKS_H_
#define MOECCL_SHIM_NCCL_HOOKS_H_

#include "shim/nccl/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  struct moecclComm* comm; /* valid until the program destroys the communicator; then MoECCL refuses it */
  int rank, n_ranks;
  int shares_device; /* 1: another rank, a thread of this process, uses the same CUDA device */
  int device;        /* CUDA ordinal, -1 where MoECCL takes host memory alone */
} moecclNcclMember;

typedef struct {
  size_t size; /* of this struct, which grows at its end */
  /* A communicator that MoECCL serves; any other is an error. `function` is for its text. */
  ncclResult_t (*member)(const char* function, ncclComm_t comm, moecclNcclMember* member);
  /* Whether MoECCL takes this process's CUDA memory. */
  int (*serves_cuda)(void);
  /* The memory of a window of the communicator. */
  ncclResult_t (*window)(ncclComm_t comm, ncclWindow_t window, void** memory);
  /* Keep a message for ncclGetLastError and return NCCL's code: a text, and the thread's last failure in MoECCL. */
  ncclResult_t (*fail)(ncclResult_t code, const char* text);
  ncclResult_t (*failed)(int moeccl_result);
  /* Keep the communicator while a call works on it: until leave(held), an abort or destroy by another thread does not
   * free it. The errors are those of member(). */
  ncclResult_t (*enter)(const char* function, ncclComm_t comm, void** held);
  void (*leave)(void* held);
} moecclNcclHooks;

/* Exported by the library that programs preload. Returns NULL if its core could not be loaded. */
#define MOECCL_NCCL_HOOKS "moecclNcclHooksOfShim"
typedef const moecclNcclHooks* (*moecclNcclHooks_t)(void);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SHIM_NCCL_HOOKS_H_ */
