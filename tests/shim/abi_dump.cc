// SPDX-License-Identifier: Apache-2.0
// Prints NCCL's sizes, offsets and values. It is built once with the shim's declarations and, where NCCL is installed,
// once with NCCL's own header (MOECCL_REAL_NCCL); a test compares the two. With NCCL's header it also checks every
// signature of the shim's list at compile time.
#include <cstddef>
#include <cstdio>

#ifdef MOECCL_REAL_NCCL
#include <nccl.h>
#include <nccl_device.h>
#if NCCL_VERSION_CODE < 23200
#define MOECCL_NCCL_2_30_ALONE
#endif
#if NCCL_VERSION_CODE < 23000
#define MOECCL_NCCL_2_28_ALONE
#else
// The library exports these, but its headers omit them in most compilations.
#undef ncclResetDebugInit
#undef pncclResetDebugInit
extern "C" void ncclResetDebugInit(), pncclResetDebugInit();
struct ncclGinOutboxHandle;
struct ncclGinInboxA2AHandle;
extern "C" ncclResult_t ncclGinOutboxCreateRequirement(int, int, ncclGinOutboxHandle*, ncclDevResourceRequirements_t*);
extern "C" ncclResult_t ncclGinInboxA2ACreateRequirement(ncclTeam_t, int, int, ncclGinInboxA2AHandle*,
                                                         ncclDevResourceRequirements_t*);
#endif
#define NCCL_FUNCTION(result, name, parameters, arguments, failure)             \
  [[maybe_unused]] static result(*const plain_##name) parameters = &nccl##name; \
  [[maybe_unused]] static result(*const profiled_##name) parameters = &pnccl##name;
#define NCCL_DEVICE_FUNCTION(result, name, parameters, arguments, failure) \
  [[maybe_unused]] static result(*const plain_##name) parameters = &nccl##name;
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
#include "shim/nccl/functions.def"
#else
#include "shim/nccl/abi.h"
// Values of 2.28.9, 2.30.7 and 2.32.3, for machines without their headers.
static_assert(sizeof(ncclConfig_t) == 120 && offsetof(ncclConfig_t, graphUsageMode) == 80);
static_assert(offsetof(ncclConfig_t, launchOrderImplicit) == 96 && offsetof(ncclConfig_t, nvlsHostMode) == 112);
static_assert(sizeof(ncclCollConfig_t) == 72 && offsetof(ncclCollConfig_t, algSelection) == 40);
static_assert(sizeof(ncclCommProperties_t) == 152 && offsetof(ncclCommProperties_t, railedGinType) == 48);
static_assert(offsetof(ncclConfig_t, netName) == 32);
static_assert(offsetof(ncclConfig_t, commName) == 48 && offsetof(ncclConfig_t, nvlinkCentricSched) == 76);
#endif

#define VALUE(name) std::printf(#name " = %lld\n", static_cast<long long>(name))
#define SIZE(type) std::printf("sizeof " #type " = %zu\n", sizeof(type))
#define OFFSET(type, member) std::printf(#type "." #member " at %zu\n", offsetof(type, member))

#ifndef MOECCL_NCCL_2_30_ALONE
void dump_2_32() {
  SIZE(ncclConfig_t);
  OFFSET(ncclConfig_t, launchOrderImplicit);
  OFFSET(ncclConfig_t, numRmaSig);
  OFFSET(ncclConfig_t, rmaEagerInit);
  OFFSET(ncclConfig_t, hostCftMode);
  OFFSET(ncclConfig_t, nvlsHostMode);
  SIZE(ncclConfigExt_t);
  OFFSET(ncclConfigExt_t, key.vendorId);
  OFFSET(ncclConfigExt_t, key.optionId);
  OFFSET(ncclConfigExt_t, val.s);
  SIZE(ncclCollConfig_t);
  OFFSET(ncclCollConfig_t, ext);
  OFFSET(ncclCollConfig_t, minCTAs);
  OFFSET(ncclCollConfig_t, maxCTAs);
  OFFSET(ncclCollConfig_t, nvlsCTAs);
  OFFSET(ncclCollConfig_t, cgaClusterSize);
  OFFSET(ncclCollConfig_t, algSelection);
  OFFSET(ncclCollConfig_t, forceAlgSelection);
  OFFSET(ncclCollConfig_t, CTAPolicy);
  OFFSET(ncclCollConfig_t, userProfilerTag);
  OFFSET(ncclCollConfig_t, launchCompletionEvent);
  SIZE(ncclEncryptionConfig_t);
  OFFSET(ncclEncryptionConfig_t, mode);
  OFFSET(ncclEncryptionConfig_t, psk);
  SIZE(ncclCommProperties_t);
  OFFSET(ncclCommProperties_t, commHash);
  OFFSET(ncclCommProperties_t, ginMinStride);
  OFFSET(ncclCommProperties_t, ginConnectionType);
  OFFSET(ncclCommProperties_t, ginSupport);
  OFFSET(ncclCommProperties_t, devCommRuntimeVersionSize);
  OFFSET(ncclCommProperties_t, cftSupport);
  OFFSET(ncclCommProperties_t, cftCountedSupport);
  VALUE(NCCL_WIN_GIN_ONLY);
  VALUE(NCCL_WIN_CFT_COUNTED);
  VALUE(NCCL_CTA_POLICY_EFFICIENCY);
  VALUE(NCCL_CTA_POLICY_ZERO);
  VALUE(NCCL_ENCRYPTION_MODE_PSK);
  VALUE(NCCL_GIN_MAX_TYPES);
  VALUE(NCCL_CFT_TEAM_HIER_LSA);
  const ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  std::printf("call config %x %d %d %d\n", config.magic, config.minCTAs, config.forceAlgSelection, config.CTAPolicy);
}
#endif

int main() {
  SIZE(ncclUniqueId);
  SIZE(ncclResult_t);
  SIZE(ncclDataType_t);
  SIZE(ncclRedOp_t);
  SIZE(ncclScalarResidence_t);
  SIZE(ncclSimInfo_t);
  SIZE(ncclTeam_t);
  SIZE(ncclComm_t);
  SIZE(ncclWindow_t);
  SIZE(cudaStream_t);
  OFFSET(ncclConfig_t, size);
  OFFSET(ncclConfig_t, magic);
  OFFSET(ncclConfig_t, version);
  OFFSET(ncclConfig_t, blocking);
  OFFSET(ncclConfig_t, cgaClusterSize);
  OFFSET(ncclConfig_t, minCTAs);
  OFFSET(ncclConfig_t, maxCTAs);
  OFFSET(ncclConfig_t, netName);
  OFFSET(ncclConfig_t, splitShare);
  OFFSET(ncclConfig_t, trafficClass);
  OFFSET(ncclConfig_t, commName);
  OFFSET(ncclConfig_t, collnetEnable);
  OFFSET(ncclConfig_t, CTAPolicy);
  OFFSET(ncclConfig_t, shrinkShare);
  OFFSET(ncclConfig_t, nvlsCTAs);
  OFFSET(ncclConfig_t, nChannelsPerNetPeer);
  OFFSET(ncclConfig_t, nvlinkCentricSched);
  OFFSET(ncclSimInfo_t, size);
  OFFSET(ncclSimInfo_t, magic);
  OFFSET(ncclSimInfo_t, version);
  OFFSET(ncclSimInfo_t, estimatedTime);
  OFFSET(ncclTeam_t, nRanks);
  OFFSET(ncclTeam_t, rank);
  OFFSET(ncclTeam_t, stride);
  VALUE(NCCL_UNIQUE_ID_BYTES);
  VALUE(NCCL_CONFIG_UNDEF_INT);
  VALUE(NCCL_SPLIT_NOCOLOR);
  VALUE(NCCL_WIN_DEFAULT);
  VALUE(NCCL_WIN_COLL_SYMMETRIC);
  VALUE(NCCL_WIN_REQUIRED_ALIGNMENT);
  VALUE(NCCL_SHRINK_DEFAULT);
  VALUE(NCCL_SHRINK_ABORT);
  VALUE(NCCL_REVOKE_DEFAULT);
  VALUE(ncclSuccess);
  VALUE(ncclUnhandledCudaError);
  VALUE(ncclSystemError);
  VALUE(ncclInternalError);
  VALUE(ncclInvalidArgument);
  VALUE(ncclInvalidUsage);
  VALUE(ncclRemoteError);
  VALUE(ncclInProgress);
  VALUE(ncclInt8);
  VALUE(ncclUint8);
  VALUE(ncclInt32);
  VALUE(ncclUint32);
  VALUE(ncclInt64);
  VALUE(ncclUint64);
  VALUE(ncclFloat16);
  VALUE(ncclFloat32);
  VALUE(ncclFloat64);
  VALUE(ncclBfloat16);
  VALUE(ncclFloat8e4m3);
  VALUE(ncclFloat8e5m2);
  VALUE(ncclNumTypes);
  VALUE(ncclSum);
  VALUE(ncclProd);
  VALUE(ncclMax);
  VALUE(ncclMin);
  VALUE(ncclAvg);
  VALUE(ncclNumOps);
  VALUE(ncclMaxRedOp);
  VALUE(ncclScalarDevice);
  VALUE(ncclScalarHostImmediate);
#ifndef MOECCL_NCCL_2_28_ALONE
  OFFSET(ncclConfig_t, graphUsageMode);
  OFFSET(ncclConfig_t, numRmaCtx);
  OFFSET(ncclConfig_t, maxP2pPeers);
  OFFSET(ncclConfig_t, graphStreamOrdering);
  SIZE(ncclWaitSignalDesc_t);
  OFFSET(ncclWaitSignalDesc_t, opCnt);
  OFFSET(ncclWaitSignalDesc_t, peer);
  OFFSET(ncclWaitSignalDesc_t, sigIdx);
  OFFSET(ncclWaitSignalDesc_t, ctx);
  SIZE(ncclMultimemHandle_t);
  OFFSET(ncclCommProperties_t, rank);
  OFFSET(ncclCommProperties_t, nRanks);
  OFFSET(ncclCommProperties_t, cudaDev);
  OFFSET(ncclCommProperties_t, nvmlDev);
  OFFSET(ncclCommProperties_t, deviceApiSupport);
  OFFSET(ncclCommProperties_t, multimemSupport);
  OFFSET(ncclCommProperties_t, ginType);
  OFFSET(ncclCommProperties_t, nLsaTeams);
  OFFSET(ncclCommProperties_t, hostRmaSupport);
  OFFSET(ncclCommProperties_t, railedGinType);
  VALUE(ncclTimeout);
  VALUE(ncclNumResults);
  VALUE(ncclStatGpuMemSuspend);
  VALUE(ncclStatGpuMemSuspended);
  VALUE(ncclStatGpuMemPersist);
  VALUE(ncclStatGpuMemTotal);
  VALUE(NCCL_WIN_STRICT_ORDERING);
  VALUE(NCCL_SUSPEND_MEM);
  VALUE(NCCL_GIN_TYPE_NONE);
#ifndef MOECCL_NCCL_2_30_ALONE
  dump_2_32();
#endif
#endif
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  std::printf("config %x %d %p\n", config.magic, config.blocking, static_cast<const void*>(config.commName));
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  std::printf("simulation %zu %x %g\n", info.size, info.magic, static_cast<double>(info.estimatedTime));
  return 0;
}
