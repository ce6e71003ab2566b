// SPDX-License-Identifier: Apache-2.0
#include "src/base/adopt.h"

#include <algorithm>
#include <cstring>

namespace moeccl {
namespace {

// Far above the size of any struct, so a larger value cannot be a real size.
constexpr size_t kMostBytes = 4096;

Status check_size(const SizedStruct& kind, size_t size, const char* argument) {
  if (size >= kind.least && size <= kMostBytes && size % sizeof(void*) == 0) return {};
  return error(moecclInvalidArgument, "{}.size is {}: set it to sizeof({}), which is {} here and at least {}", argument,
               size, kind.name, kind.present, kind.least);
}

}  // namespace

// The sizes in version 0.1. A struct that was added later has the size of its first release.
#define MOECCL_SIZED(T, bytes)     \
  template <>                      \
  SizedStruct sized_struct<T>() {  \
    return {#T, bytes, sizeof(T)}; \
  }
MOECCL_SIZED(moecclCodec_t, 32)
MOECCL_SIZED(moecclExpertUse_t, 48)
MOECCL_SIZED(moecclConfig_t, 56)
MOECCL_SIZED(moecclPlacement_t, 32)
MOECCL_SIZED(moecclHybridConfig_t, 80)
MOECCL_SIZED(moecclHybridInfo_t, 120)
MOECCL_SIZED(moecclMigrationConfig_t, 40)
MOECCL_SIZED(moecclMigrationInfo_t, 48)
MOECCL_SIZED(moecclGradientReturnConfig_t, 40)
MOECCL_SIZED(moecclGradientReturnInfo_t, 48)
MOECCL_SIZED(moecclMoeConfig_t, 96)
MOECCL_SIZED(moecclRoutingInfo_t, 656)
MOECCL_SIZED(moecclRoutingDeviceInfo_t, 64)
MOECCL_SIZED(moecclTensorGroups_t, 24)
MOECCL_SIZED(moecclPlanInfo_t, 88)
MOECCL_SIZED(moecclReplaceConfig_t, 48)
MOECCL_SIZED(moecclReplaceInfo_t, 144)
MOECCL_SIZED(moecclSimulateConfig_t, 128)
MOECCL_SIZED(moecclSampleProblem_t, 112)
MOECCL_SIZED(moecclSampleAnswer_t, 88)
MOECCL_SIZED(moecclSwapProblem_t, 136)
MOECCL_SIZED(moecclSwapAnswer_t, 64)
MOECCL_SIZED(moecclExpertSwapConfig_t, 56)
MOECCL_SIZED(moecclExpertSwapInfo_t, 88)
MOECCL_SIZED(moecclSwapLevels_t, 304)
MOECCL_SIZED(moecclReplicaProblem_t, 72)
MOECCL_SIZED(moecclReplicaAnswer_t, 72)
MOECCL_SIZED(moecclReplicaCost_t, 56)
MOECCL_SIZED(moecclReplicaDispatch_t, 24)
MOECCL_SIZED(moecclBalanceProblem_t, 72)
MOECCL_SIZED(moecclBalanceAnswer_t, 56)
MOECCL_SIZED(moecclDomainProblem_t, 80)
MOECCL_SIZED(moecclDomainAnswer_t, 56)
MOECCL_SIZED(moecclComputeShape_t, 72)
MOECCL_SIZED(moecclChunkProblem_t, 152)
MOECCL_SIZED(moecclChunkAnswer_t, 96)
MOECCL_SIZED(moecclLayoutProblem_t, 112)
MOECCL_SIZED(moecclLayoutCost_t, 56)

Status adopt_bytes(const SizedStruct& kind, const void* given, const char* argument, void* to) {
  if (given == nullptr) return error(moecclInvalidArgument, "{} is NULL: give a {}", argument, kind.name);
  size_t size = 0;
  std::memcpy(&size, given, sizeof(size));
  MOECCL_TRY(check_size(kind, size, argument));
  const auto* bytes = static_cast<const char*>(given);
  const auto set = [](char byte) { return byte != 0; };
  if (size > kind.present && std::any_of(bytes + kind.present, bytes + size, set))
    return error(moecclInvalidArgument,
                 "{} sets a field beyond the {} bytes of {} that this library knows: leave it 0, or load the library "
                 "that the program's headers came with",
                 argument, kind.present, kind.name);
  std::memcpy(to, given, std::min(size, kind.present));
  std::memcpy(to, &kind.present, sizeof(kind.present));
  return {};
}

Status check_sized(const SizedStruct& kind, const void* out, const char* argument) {
  if (out == nullptr) return error(moecclInvalidArgument, "{} is NULL: give the address of a {}", argument, kind.name);
  size_t size = 0;
  std::memcpy(&size, out, sizeof(size));
  return check_size(kind, size, argument);
}

void give_bytes(const SizedStruct& kind, const void* made, void* out) {
  size_t size = 0;
  std::memcpy(&size, out, sizeof(size));
  const size_t known = std::min(size, kind.present);
  std::memcpy(out, made, known);
  std::memset(static_cast<char*>(out) + known, 0, size - known);
  std::memcpy(out, &size, sizeof(size));
}

}  // namespace moeccl
