// SPDX-License-Identifier: Apache-2.0
// The runtime's parameters (NCCL 2.29 and later).
#include "shim/nccl/core.h"
#include "shim/nccl/join.h"

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
