/* SPDX-License-Identifier: Apache-2.0 */
/* How the exported entry points (entry.c) reach the shim behind them (the core, loaded at the first NCCL call). */
#ifndef MOECCL_SHIM_NCCL_TABLE_H_
#define MOECCL_SHIM_NCCL_TABLE_H_

#include "shim/nccl/hooks.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOECCL_NCCL_MEMBER(result, name, parameters, arguments, failure) result(*name) parameters;
#define NCCL_FUNCTION MOECCL_NCCL_MEMBER
#define NCCL_DEVICE_FUNCTION MOECCL_NCCL_MEMBER
typedef struct {
#include "shim/nccl/functions.def"
  const moecclNcclHooks* hooks;
} moecclNcclTable;
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION
#undef MOECCL_NCCL_MEMBER

/* The core's only symbol. The table lives as long as the process. */
#define MOECCL_NCCL_CORE "libmoeccl-nccl-core.so"
#define MOECCL_NCCL_CORE_SYMBOL "moecclNcclCore"
typedef const moecclNcclTable* (*moecclNcclCore_t)(void);

/* Every build of the shim exports this, so that it never takes another one for NCCL. */
#define MOECCL_NCCL_MARKER "moecclNcclShim"

static inline ncclTeam_t moeccl_no_team(void) {
  const ncclTeam_t none = {0, 0, 0};
  return none;
}

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SHIM_NCCL_TABLE_H_ */
