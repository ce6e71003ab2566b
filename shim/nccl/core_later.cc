// SPDX-License-Identifier: Apache-2.0
// Additions of NCCL 2.29 and 2.30 that fit no other file: suspension, properties and the runtime's parameters.
#include <algorithm>
#include <cstddef>
#include <cstring>

#include "shim/nccl/core.h"
#include "shim/nccl/group.h"
#include "shim/nccl/join.h"
#include "shim/nccl/real.h"

namespace moeccl::shim {
namespace {

// Parameters are NCCL's own. A job that MoECCL serves has none, and NCCL, which is large, is not opened just to ask.
bool has_params() {
  std::string reason;
  return real_if_open() != nullptr || wants_nccl(&reason);
}
ncclResult_t no_params(const char* function) {
  return fail(ncclInvalidArgument, std::string(function) +
                                       ": MoECCL serves this process and has no parameters of NCCL's: set "
                                       "MOECCL_ variables, or run this program with MOECCL_SHIM_MODE=nccl");
}

}  // namespace

namespace core {

ncclResult_t CommSuspend(ncclComm_t comm, int flags) {
  Target target;
  const ncclResult_t result = resolve("ncclCommSuspend", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return forward_in_group([&] { return MOECCL_FORWARD(CommSuspend, target.real, flags); });
  if (flags != NCCL_SUSPEND_MEM) {
    return fail(ncclInvalidArgument, "ncclCommSuspend: flags is " + std::to_string(flags) + ": give NCCL_SUSPEND_MEM");
  }
  // Its memory stays, because peers access it, but no operation is left on it and none begins.
  const ncclResult_t idle = from_moeccl(moecclCommFinalize(target.ours->ours));
  if (idle == ncclSuccess) target.ours->suspended = true;
  return idle;
}

ncclResult_t CommResume(ncclComm_t comm) {
  Target target;
  const ncclResult_t result = resolve("ncclCommResume", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return forward_in_group([&] { return MOECCL_FORWARD(CommResume, target.real); });
  if (!target.ours->suspended.exchange(false)) {
    return fail(ncclInvalidUsage, "ncclCommResume: the communicator is not suspended");
  }
  return ncclSuccess;
}

ncclResult_t CommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value) {
  if (value == nullptr) return fail(ncclInvalidArgument, "ncclCommMemStats: value is NULL");
  Target target;
  const ncclResult_t result = resolve("ncclCommMemStats", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return MOECCL_FORWARD(CommMemStats, target.real, stat, value);
  *value = 0;
  switch (stat) {
    case ncclStatGpuMemSuspend:
      return ncclSuccess;  // nothing is given back
    case ncclStatGpuMemSuspended:
      *value = target.ours->suspended ? 1 : 0;
      return ncclSuccess;
    case ncclStatGpuMemPersist:
    case ncclStatGpuMemTotal: {
      // Host memory stands in for the device's where there is no device, as buffers do.
      size_t bytes = 0;
      const ncclResult_t asked = from_moeccl(moecclCommMemoryUsage(target.ours->ours, &bytes));
      *value = bytes;
      return asked;
    }
  }
  return fail(ncclInvalidArgument,
              "ncclCommMemStats: stat is " + std::to_string(static_cast<int>(stat)) + ": give an ncclCommMemStat_t");
}

ncclResult_t CommQueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  Target target;
  const ncclResult_t result = resolve("ncclCommQueryProperties", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return MOECCL_FORWARD(CommQueryProperties, target.real, properties);
  if (properties == nullptr || properties->magic != NCCL_CONFIG_MAGIC ||
      properties->size < offsetof(ncclCommProperties_t, rank)) {
    return fail(ncclInvalidArgument,
                "ncclCommQueryProperties: assign NCCL_COMM_PROPERTIES_INITIALIZER to its argument first");
  }
  ncclCommProperties_t all{};
  std::memcpy(static_cast<void*>(&all), properties, offsetof(ncclCommProperties_t, rank));
  all.rank = target.ours->rank;
  all.nRanks = target.ours->n_ranks;
  all.cudaDev = target.ours->device;
  all.nvmlDev = target.ours->device;
  uint64_t seed[2];  // a secret of the ranks, of which the hash must not reveal much
  std::memcpy(seed, target.ours->seed.data(), sizeof seed);
  all.commHash = (seed[0] ^ seed[1]) * 0x9e3779b97f4a7c15u;
  all.hostRmaSupport = target.ours->rma.reaches_all();
  all.nLsaTeams = all.nRanks;  // no kernel accesses another rank's memory, so each rank is its own team
  std::memcpy(static_cast<void*>(properties), &all, std::min(properties->size, sizeof all));
  return ncclSuccess;
}

ncclResult_t ParamBind(ncclParamHandle_t* out, const char* key) {
  if (!has_params()) return no_params("ncclParamBind");
  return MOECCL_FORWARD(ParamBind, out, key);
}

#define PARAM_GET(name, type)                            \
  ncclResult_t name(ncclParamHandle_t param, type out) { \
    if (!has_params()) return no_params("nccl" #name);   \
    return MOECCL_FORWARD(name, param, out);             \
  }
PARAM_GET(ParamGetI8, int8_t*)
PARAM_GET(ParamGetI16, int16_t*)
PARAM_GET(ParamGetI32, int32_t*)
PARAM_GET(ParamGetI64, int64_t*)
PARAM_GET(ParamGetU8, uint8_t*)
PARAM_GET(ParamGetU16, uint16_t*)
PARAM_GET(ParamGetU32, uint32_t*)
PARAM_GET(ParamGetU64, uint64_t*)
PARAM_GET(ParamGetStr, const char**)
#undef PARAM_GET

ncclResult_t ParamGet(ncclParamHandle_t param, void* out, int most, int* bytes) {
  if (!has_params()) return no_params("ncclParamGet");
  return MOECCL_FORWARD(ParamGet, param, out, most, bytes);
}

ncclResult_t ParamGetParameter(const char* key, const char** value, int* bytes) {
  if (!has_params()) return no_params("ncclParamGetParameter");
  return MOECCL_FORWARD(ParamGetParameter, key, value, bytes);
}

ncclResult_t ParamGetAllParameterKeys(const char*** table, int* n) {
  if (has_params()) return MOECCL_FORWARD(ParamGetAllParameterKeys, table, n);
  if (table == nullptr || n == nullptr) {
    return fail(ncclInvalidArgument, "ncclParamGetAllParameterKeys: table or tableLen is NULL: give addresses");
  }
  static const char* none[] = {nullptr};
  *table = none;
  *n = 0;
  return ncclSuccess;
}

void ParamDumpAll() {
  const Real* real = has_params() ? real_nccl() : nullptr;
  if (real == nullptr || real->call.ParamDumpAll == nullptr) return;
  const InReal inside;
  real->call.ParamDumpAll();
}

}  // namespace core
}  // namespace moeccl::shim
