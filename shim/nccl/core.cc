// SPDX-License-Identifier: Apache-2.0
// The core's table, and the functions that concern no communicator in particular.
#include "shim/nccl/core.h"

#include <algorithm>

#include "shim/nccl/device.h"
#include "shim/nccl/join.h"
#include "src/base/uncancelled.h"

namespace moeccl::shim {

extern const moecclNcclHooks kHooks;  // core_hooks.cc

namespace {

// NCCL calls some of its functions by their public names. Such calls come back here, and go straight back to it.
namespace entry {
#define ENTER(result, name, parameters, arguments, failure)                              \
  result name parameters {                                                               \
    const Real* real = InReal::now() ? real_if_open() : nullptr;                         \
    if (real != nullptr && real->call.name != nullptr) return real->call.name arguments; \
    const Uncancelled uncancelled;                                                       \
    try {                                                                                \
      return core::name arguments;                                                       \
    } catch (const std::exception& e) {                                                  \
      fail_thrown(e);                                                                    \
      return failure;                                                                    \
    }                                                                                    \
  }
#define NCCL_FUNCTION ENTER
#define NCCL_DEVICE_FUNCTION ENTER
#include "shim/nccl/functions.def"
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION
#undef ENTER
}  // namespace entry

constexpr moecclNcclTable kTable = {
#define MEMBER(result, name, parameters, arguments, failure) entry::name,
#define NCCL_FUNCTION MEMBER
#define NCCL_DEVICE_FUNCTION MEMBER
#include "shim/nccl/functions.def"
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION
#undef MEMBER
    &kHooks};

}  // namespace

// A program may ask for a version or an id before it forks, and the children of a process that has initialised CUDA
// cannot use it. So `auto` tries the device only where the program already uses it.
static bool wants_nccl_before_init(std::string* reason) {
  return (settings().mode != Mode::kAuto || device::in_use()) && wants_nccl(reason);
}

namespace core {

ncclResult_t GetVersion(int* version) {
  if (version == nullptr)
    return fail(ncclInvalidArgument, "ncclGetVersion: version is NULL: give the address of an int");
  // Programs choose what they call by this number, so it is the real library's where that serves everything.
  std::string reason;
  const Real* real = wants_nccl_before_init(&reason) ? real_nccl() : nullptr;
  *version = real == nullptr ? settings().version : std::min(real->version, settings().most_version);
  return ncclSuccess;
}

ncclResult_t GetUniqueId(ncclUniqueId* id) {
  if (id == nullptr)
    return fail(ncclInvalidArgument, "ncclGetUniqueId: id is NULL: give the address of an ncclUniqueId");
  // A job that goes to NCCL as a whole does not need MoECCL to agree on that.
  std::string reason;
  if (wants_nccl_before_init(&reason) && real_nccl() != nullptr) {
    const ncclResult_t refused = refuse_unencrypted(reason);
    return refused != ncclSuccess ? refused : MOECCL_FORWARD(GetUniqueId, id);
  }
  return make_id(id, true);
}

const char* GetErrorString(ncclResult_t result) {
  const Real* real = settings().mode == Mode::kNccl ? real_if_open() : nullptr;
  if (real != nullptr && real->call.GetErrorString != nullptr) return real->call.GetErrorString(result);
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "a CUDA call failed (ncclGetLastError says which)";
    case ncclSystemError:
      return "a system call or an allocation failed (ncclGetLastError says which)";
    case ncclInternalError:
      return "internal error (ncclGetLastError says which)";
    case ncclInvalidArgument:
      return "invalid argument (ncclGetLastError names it)";
    case ncclInvalidUsage:
      return "invalid usage (ncclGetLastError says why)";
    case ncclRemoteError:
      return "another rank failed, left or did not come in time (ncclGetLastError names it)";
    case ncclInProgress:
      return "operation in progress";
    case ncclTimeout:
      return "an operation did not end in time";
    case ncclNumResults:
      break;
  }
  return "unknown result code";
}

const char* GetLastError(ncclComm_t comm) {
  const Real* real = real_if_open();
  if (real == nullptr || real->call.GetLastError == nullptr) return last_error();
  const Held held = hold(comm);
  const bool theirs = held ? held->real != nullptr : comm != nullptr || failed_elsewhere();
  return theirs ? real->call.GetLastError(held ? held->real : comm) : last_error();
}

void ResetDebugInit() {
  const Real* real = real_if_open();
  if (real == nullptr || real->call.ResetDebugInit == nullptr) return;
  const InReal inside;
  real->call.ResetDebugInit();
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

ncclResult_t GroupStart() { return group_start(); }
ncclResult_t GroupEnd() { return group_end(nullptr); }

ncclResult_t GroupSimulateEnd(ncclSimInfo_t* info) {
  if (!group_open()) return group_end(nullptr);
  if (info == nullptr || info->magic != NCCL_SIM_INFO_MAGIC || info->size < sizeof(ncclSimInfo_t)) {
    const ncclResult_t refused = fail_group(
        fail(ncclInvalidArgument, "ncclGroupSimulateEnd: assign NCCL_SIM_INFO_INITIALIZER to its argument first"));
    (void)group_end(nullptr);  // which issues nothing
    return refused;
  }
  return group_end(info);
}

}  // namespace core
}  // namespace moeccl::shim

extern "C" __attribute__((visibility("default"))) const moecclNcclTable* moecclNcclCore(void) {
  return &moeccl::shim::kTable;
}
