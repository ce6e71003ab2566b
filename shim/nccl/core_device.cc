// SPDX-License-Identifier: Apache-2.0
// The host side of NCCL's device interface, most of which only NCCL can serve.
#include "shim/nccl/core.h"
#include "shim/nccl/windows.h"

namespace moeccl::shim {
namespace {

ncclResult_t no_device_api(const char* function) {
  return fail(ncclInvalidUsage, std::string(function) +
                                    ": kernels cannot communicate by themselves over a communicator of MoECCL: run "
                                    "this program with MOECCL_SHIM_MODE=nccl");
}

// As forward(), for functions that return no result code: `failure` says that there is none to call.
template <class R, class... P>
R ask_real(R failure, R (*moecclNcclTable::*member)(P...), P... arguments) {
  const Real* real = real_nccl();
  if (real == nullptr || real->call.*member == nullptr) return failure;
  const InReal inside;
  return (real->call.*member)(arguments...);
}

// An unknown handle gets the empty team.
template <class... P>
ncclTeam_t team_of(const char* function, ncclComm_t comm, bool alone,
                   ncclTeam_t (*moecclNcclTable::*member)(ncclComm_t, P...), P... more) {
  Target target;
  if (resolve(function, comm, &target) != ncclSuccess) return moeccl_no_team();
  if (target.real != nullptr) return ask_real(moeccl_no_team(), member, target.real, more...);
  return alone ? ncclTeam_t{1, 0, 1} : ncclTeam_t{target.ours->n_ranks, target.ours->rank, 1};
}

}  // namespace

namespace core {

ncclResult_t DevCommCreate(ncclComm_t comm, ncclDevCommRequirements_t const* wanted, ncclDevComm_t* dev_comm) {
  MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, Need::kUsable, DevCommCreate, target.real, wanted, dev_comm);
  return no_device_api("ncclDevCommCreate");
}

ncclResult_t DevCommDestroy(ncclComm_t comm, ncclDevComm_t const* dev_comm) {
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kUsable, DevCommDestroy, target.real, dev_comm);
  return no_device_api("ncclDevCommDestroy");
}

ncclTeam_t TeamWorld(ncclComm_t comm) { return team_of("ncclTeamWorld", comm, false, &moecclNcclTable::TeamWorld); }
// Kernels do not load from or store to another rank's memory here: every rank is its own team, and all are one rail.
ncclTeam_t TeamLsa(ncclComm_t comm) { return team_of("ncclTeamLsa", comm, true, &moecclNcclTable::TeamLsa); }
ncclTeam_t TeamRail(ncclComm_t comm) { return team_of("ncclTeamRail", comm, false, &moecclNcclTable::TeamRail); }
// Nor does a rank have fabric handles.
ncclTeam_t TeamCft(ncclComm_t comm, ncclCftTeamMode_t mode) {
  return team_of("ncclTeamCft", comm, true, &moecclNcclTable::TeamCft, mode);
}
ncclTeam_t TeamCftMultimem(ncclComm_t comm) {
  return team_of("ncclTeamCftMultimem", comm, true, &moecclNcclTable::TeamCftMultimem);
}

int TeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  Target target;
  if (resolve("ncclTeamRankToWorld", comm, &target) != ncclSuccess) return -1;
  if (target.real != nullptr) return ask_real(-1, &moecclNcclTable::TeamRankToWorld, target.real, team, rank);
  return target.ours->rank + (rank - team.rank) * team.stride;
}

int TeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  Target target;
  if (resolve("ncclTeamRankToLsa", comm, &target) != ncclSuccess) return -1;
  if (target.real != nullptr) return ask_real(-1, &moecclNcclTable::TeamRankToLsa, target.real, team, rank);
  return (rank - team.rank) * team.stride;  // this rank is 0 of its team
}

ncclResult_t GinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int n_barriers,
                                         ncclGinBarrierHandle_t* handle, ncclDevResourceRequirements_t* requirement) {
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kUsable, GinBarrierCreateRequirement, target.real, team, n_barriers,
                         handle, requirement);
  return no_device_api("ncclGinBarrierCreateRequirement");
}

int LLA2ACalcSlots(int max_elements, int max_element_size) {
  const Real* real = real_nccl();
  if (real != nullptr && real->call.LLA2ACalcSlots != nullptr) {
    return real->call.LLA2ACalcSlots(max_elements, max_element_size);
  }
  (void)no_device_api("ncclLLA2ACalcSlots");
  return 0;
}

#define BARE(...) __VA_ARGS__
#define FORWARD_UNLESS(ours, name, parameters, arguments) \
  ncclResult_t name parameters {                          \
    if (ours) return no_device_api("nccl" #name);         \
    return MOECCL_FORWARD(name, BARE arguments);          \
  }
// Windows name their communicators. A window that is not one of ours is NCCL's.
#define NCCL_WINDOW_FUNCTION(result, name, parameters, arguments, failure) \
  FORWARD_UNLESS(is_our_window(window), name, parameters, arguments)
// These name no communicator, and only NCCL's device interface uses their results.
#define NCCL_NOCOMM_FUNCTION(result, name, parameters, arguments, failure) \
  FORWARD_UNLESS(real_nccl() == nullptr, name, parameters, arguments)
#define NCCL_DEVICE_FUNCTION(result, name, parameters, arguments, failure)
#define NCCL_FUNCTION NCCL_DEVICE_FUNCTION
#include "shim/nccl/functions.def"
#undef NCCL_FUNCTION
#undef NCCL_DEVICE_FUNCTION
#undef FORWARD_UNLESS
#undef BARE

}  // namespace core
}  // namespace moeccl::shim
