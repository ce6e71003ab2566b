/* SPDX-License-Identifier: Apache-2.0 */
/* How the exported entry points (entry.c) reach the functions behind them (the core, loaded at the first call). */
#ifndef MOECCL_SHIM_NCCL_EP_TABLE_H_
#define MOECCL_SHIM_NCCL_EP_TABLE_H_

#include "shim/nccl_ep/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define NCCL_EP_FUNCTION(name, parameters, arguments) ncclResult_t(*name) parameters;
typedef struct {
#include "shim/nccl_ep/functions.def"
} moecclNcclEpTable;
#undef NCCL_EP_FUNCTION

/* The core's only symbol. The table lives as long as the process. */
#define MOECCL_NCCL_EP_CORE "libmoeccl-nccl-ep-core.so"
#define MOECCL_NCCL_EP_CORE_SYMBOL "moecclNcclEpCore"
typedef const moecclNcclEpTable* (*moecclNcclEpCore_t)(void);

#ifdef __cplusplus
}
#endif

#endif /* MOECCL_SHIM_NCCL_EP_TABLE_H_ */
