/* SPDX-License-Identifier: Apache-2.0 */
/* What test programs link to as libnccl_ep.so.0. The preloaded library's functions come before these. */
#include "shim/nccl_ep/abi.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NCCL_EP_FUNCTION(name, parameters, arguments) \
  __attribute__((visibility("default"))) ncclResult_t ncclEp##name parameters { return ncclInternalError; }
#include "shim/nccl_ep/functions.def"
