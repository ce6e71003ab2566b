// SPDX-License-Identifier: Apache-2.0
// Memory, registrations, windows, operators with a scalar, and the host side of NCCL's device interface.
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include "shim/nccl/core.h"
#include "shim/nccl/device.h"
#include "shim/nccl/group.h"
#include "shim/nccl/join.h"
#include "shim/nccl/ours.h"
#include "shim/nccl/real.h"
#include "shim/nccl/windows.h"

namespace moeccl::shim {
namespace {

// What the program got from MoECCL and may give back.
struct Ours {
  std::mutex mutex;
  std::unordered_map<void*, int> allocations;  // made by MemAlloc: the device's ordinal, -1 on the host
  struct Window {
    ncclComm_t comm = nullptr;
    void *registration = nullptr, *buffer = nullptr;
    uint32_t number = Rma::kNoWindow;
  };
  std::unordered_map<ncclWindow_t, Window> windows;
};
Ours& ours() {
  static auto* const o = new Ours;  // never destroyed: programs free in their own destructors
  return *o;
}

ncclResult_t no_device_api(const char* function) {
  return fail(ncclInvalidUsage, std::string(function) +
                                    ": kernels cannot communicate by themselves over a communicator of MoECCL: run "
                                    "this program with MOECCL_SHIM_MODE=nccl");
}

// `ordinal` is the device's; -1 for host memory.
ncclResult_t free_memory(void* ptr, int ordinal) {
  if (ordinal < 0) return from_moeccl(moecclMemFree(ptr));
  const device::Current current(ordinal);  // a destructor may run on a thread that has used no device
  if (current.ok() && device::release(ptr)) return ncclSuccess;
  return fail(ncclUnhandledCudaError, "ncclMemFree: device " + std::to_string(ordinal) + " refuses");
}

bool is_our_window(ncclWindow_t window) {
  const std::lock_guard lock(ours().mutex);
  return ours().windows.contains(window);
}

// Team functions return no result code, so an unknown handle gets the empty team.
ncclTeam_t team_of(const char* function, ncclComm_t comm, ncclTeam_t (*moecclNcclTable::*forwarded)(ncclComm_t),
                   bool alone) {
  Target target;
  if (resolve(function, comm, &target) != ncclSuccess) return moeccl_no_team();
  if (target.real != nullptr) {
    const Real* real = real_nccl();
    if (real == nullptr || real->call.*forwarded == nullptr) return moeccl_no_team();
    const InReal inside;
    return (real->call.*forwarded)(target.real);
  }
  return alone ? ncclTeam_t{1, 0, 1} : ncclTeam_t{target.ours->n_ranks, target.ours->rank, 1};
}

}  // namespace

bool find_window(ncclWindow_t window, ncclComm_t comm, uint32_t* number) {
  const std::lock_guard lock(ours().mutex);
  const auto found = ours().windows.find(window);
  if (found == ours().windows.end() || found->second.comm != comm) return false;
  *number = found->second.number;
  return true;
}

void drop_windows(ncclComm_t comm) {
  const std::lock_guard lock(ours().mutex);
  std::erase_if(ours().windows, [comm](const auto& entry) {
    if (entry.second.comm != comm) return false;
    delete reinterpret_cast<char*>(entry.first);
    return true;
  });
}

namespace core {

ncclResult_t MemAlloc(void** ptr, size_t size) {
  if (ptr == nullptr) return fail(ncclInvalidArgument, "ncclMemAlloc: ptr is NULL: give the address of a pointer");
  *ptr = nullptr;
  std::string reason;
  if (wants_nccl(&reason)) return MOECCL_FORWARD(MemAlloc, ptr, size);
  // A program on a GPU expects memory that its kernels can access.
  const bool on_device = moeccl_serves_cuda();
  if (on_device) {
    *ptr = device::allocate(size);
    if (*ptr == nullptr) {
      return fail(ncclUnhandledCudaError, "ncclMemAlloc: the device gives no " + std::to_string(size) + " bytes");
    }
  } else {
    const ncclResult_t result = from_moeccl(moecclMemAlloc(ptr, size));
    if (result != ncclSuccess) return result;
  }
  const std::lock_guard lock(ours().mutex);
  ours().allocations.emplace(*ptr, on_device ? device::current() : -1);
  return ncclSuccess;
}

ncclResult_t MemFree(void* ptr) {
  if (ptr == nullptr) return ncclSuccess;
  std::optional<int> ordinal;
  {
    const std::lock_guard lock(ours().mutex);
    // Forgotten before it is freed, because the address may be another thread's next.
    if (const auto taken = ours().allocations.extract(ptr); !taken.empty()) ordinal = taken.mapped();
  }
  if (ordinal) {
    const ncclResult_t result = free_memory(ptr, *ordinal);
    if (result == ncclSuccess) return result;
    const std::lock_guard lock(ours().mutex);
    ours().allocations.emplace(ptr, *ordinal);
    return result;
  }
  if (real_if_open() != nullptr) return MOECCL_FORWARD(MemFree, ptr);
  return fail(ncclInvalidArgument, "ncclMemFree: the pointer is not one of ncclMemAlloc, or was freed before");
}

ncclResult_t CommRegister(const ncclComm_t comm, void* buffer, size_t size, void** handle) {
  if (handle == nullptr) return fail(ncclInvalidArgument, "ncclCommRegister: handle is NULL");
  Target target;
  const ncclResult_t result = resolve("ncclCommRegister", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return MOECCL_FORWARD(CommRegister, target.real, buffer, size, handle);
  return from_moeccl(moecclCommRegister(target.ours->ours, buffer, size, handle));
}

ncclResult_t CommDeregister(const ncclComm_t comm, void* handle) {
  Target target;
  const ncclResult_t result = resolve("ncclCommDeregister", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return MOECCL_FORWARD(CommDeregister, target.real, handle);
  if (handle == nullptr) return ncclSuccess;  // as in NCCL
  const ncclResult_t done = from_moeccl(moecclCommDeregister(target.ours->ours, handle));
  return done == ncclInvalidArgument ? ncclInvalidUsage : done;  // NCCL's code for a handle that it does not know
}

// Collectives use the window's memory like any registered memory; kernels cannot use it (see DevCommCreate).
ncclResult_t CommWindowRegister(ncclComm_t comm, void* buffer, size_t size, ncclWindow_t* window, int flags) {
  if (window == nullptr) return fail(ncclInvalidArgument, "ncclCommWindowRegister: win is NULL");
  *window = nullptr;
  Target target;
  ncclResult_t result = resolve("ncclCommWindowRegister", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) {
    result = enter_real_group();
    if (result != ncclSuccess) return result;
    return MOECCL_FORWARD(CommWindowRegister, target.real, buffer, size, window, flags);
  }
  void* registration = nullptr;
  result = from_moeccl(moecclCommRegister(target.ours->ours, buffer, size, &registration));
  if (result != ncclSuccess) {
    target.ours->rma.skip_window();
    return result;
  }
  auto* made = reinterpret_cast<ncclWindow_t>(new char);  // an address that names this window and nothing else
  const uint32_t number = target.ours->rma.add_window(buffer, size, device::owns(buffer));
  const std::lock_guard lock(ours().mutex);
  ours().windows.emplace(made, Ours::Window{comm, registration, buffer, number});
  *window = made;
  return ncclSuccess;
}

ncclResult_t CommWindowDeregister(ncclComm_t comm, ncclWindow_t window) {
  if (window == nullptr) return ncclSuccess;
  Target target;
  const ncclResult_t result = resolve("ncclCommWindowDeregister", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return MOECCL_FORWARD(CommWindowDeregister, target.real, window);
  void* registration = nullptr;
  uint32_t number = 0;
  {
    const std::lock_guard lock(ours().mutex);
    const auto found = ours().windows.find(window);
    if (found == ours().windows.end() || found->second.comm != comm) {
      return fail(ncclInvalidArgument, "ncclCommWindowDeregister: win is no window of this communicator");
    }
    registration = found->second.registration;
    number = found->second.number;
    ours().windows.erase(found);
  }
  target.ours->rma.remove_window(number);
  delete reinterpret_cast<char*>(window);
  return from_moeccl(moecclCommDeregister(target.ours->ours, registration));
}

ncclResult_t WinGetUserPtr(ncclComm_t comm, ncclWindow_t window, void** pointer) {
  if (pointer == nullptr) return fail(ncclInvalidArgument, "ncclWinGetUserPtr: outUserPtr is NULL");
  *pointer = nullptr;
  Target target;
  const ncclResult_t result = resolve("ncclWinGetUserPtr", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) return MOECCL_FORWARD(WinGetUserPtr, target.real, window, pointer);
  const std::lock_guard lock(ours().mutex);
  const auto found = ours().windows.find(window);
  if (found == ours().windows.end() || found->second.comm != comm) {
    return fail(ncclInvalidArgument, "ncclWinGetUserPtr: win is no window of this communicator");
  }
  *pointer = found->second.buffer;
  return ncclSuccess;
}

ncclResult_t RedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t residence,
                                  ncclComm_t comm) {
  if (op == nullptr || scalar == nullptr) {
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: op or scalar is NULL: give addresses");
  }
  if (residence != ncclScalarDevice && residence != ncclScalarHostImmediate) {
    return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: residence is " + std::to_string(residence) +
                                         ": give ncclScalarDevice or ncclScalarHostImmediate");
  }
  Target target;
  ncclResult_t result = resolve("ncclRedOpCreatePreMulSum", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) {
    return MOECCL_FORWARD(RedOpCreatePreMulSum, op, scalar, type, residence, target.real);
  }
  Comm::PreMul made{.used = true, .type = type};
  if (residence == ncclScalarDevice && !device::names(scalar)) {
    if (moecclTypeSize(static_cast<moecclDataType_t>(type)) == 0) {
      return fail(ncclInvalidArgument, "ncclRedOpCreatePreMulSum: datatype is " + std::to_string(type) + ": give one");
    }
    made.scalar = scalar;
  } else {
    result = from_moeccl(
        moecclRedOpCreatePreMulSum(&made.made, scalar, static_cast<moecclDataType_t>(type), target.ours->ours));
    if (result != ncclSuccess) return result;
  }
  Comm& c = *target.ours;
  const std::lock_guard lock(c.mutex);
  size_t i = 0;
  while (i < c.premuls.size() && c.premuls[i].used) ++i;
  if (i == c.premuls.size()) c.premuls.emplace_back();
  c.premuls[i] = made;
  *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(i));
  return ncclSuccess;
}

ncclResult_t RedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  Target target;
  const ncclResult_t result = resolve("ncclRedOpDestroy", comm, &target, Need::kMade);
  if (result != ncclSuccess) return result;
  if (target.real != nullptr) {
    if (!group_open()) return MOECCL_FORWARD(RedOpDestroy, op, target.real);
    after_group([op, real = target.real] { (void)MOECCL_FORWARD(RedOpDestroy, op, real); });  // its calls are kept too
    return ncclSuccess;
  }
  const auto i = static_cast<size_t>(op) - ncclNumOps;
  {
    const std::lock_guard lock(target.ours->mutex);
    if (op < ncclNumOps || i >= target.ours->premuls.size() || !target.ours->premuls[i].used) {
      return fail(ncclInvalidArgument,
                  "ncclRedOpDestroy: op is " + std::to_string(op) + ": give a live one of this communicator");
    }
  }
  // Calls of an open group still need the operator, so it is destroyed after them.
  after_group([handle = comm, i] {
    const Held c = hold(handle);
    if (!c) return;
    const std::lock_guard lock(c->mutex);
    if (c->premuls[i].scalar == nullptr) (void)moecclRedOpDestroy(c->premuls[i].made, c->ours);
    c->premuls[i].used = false;
  });
  return ncclSuccess;
}

ncclResult_t DevCommCreate(ncclComm_t comm, ncclDevCommRequirements_t const* wanted, ncclDevComm_t* dev_comm) {
  Target target;
  const ncclResult_t result = resolve("ncclDevCommCreate", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real == nullptr) return no_device_api("ncclDevCommCreate");
  return forward_in_group([&] { return MOECCL_FORWARD(DevCommCreate, target.real, wanted, dev_comm); });
}

ncclResult_t DevCommDestroy(ncclComm_t comm, ncclDevComm_t const* dev_comm) {
  Target target;
  const ncclResult_t result = resolve("ncclDevCommDestroy", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real == nullptr) return no_device_api("ncclDevCommDestroy");
  return MOECCL_FORWARD(DevCommDestroy, target.real, dev_comm);
}

ncclTeam_t TeamWorld(ncclComm_t comm) { return team_of("ncclTeamWorld", comm, &moecclNcclTable::TeamWorld, false); }
// Kernels do not load from or store to another rank's memory here: every rank is its own team, and all are one rail.
ncclTeam_t TeamLsa(ncclComm_t comm) { return team_of("ncclTeamLsa", comm, &moecclNcclTable::TeamLsa, true); }
ncclTeam_t TeamRail(ncclComm_t comm) { return team_of("ncclTeamRail", comm, &moecclNcclTable::TeamRail, false); }

// Nor does a rank have fabric handles.
ncclTeam_t TeamCft(ncclComm_t comm, ncclCftTeamMode_t mode) {
  Target target;
  if (resolve("ncclTeamCft", comm, &target) != ncclSuccess) return moeccl_no_team();
  if (target.real == nullptr) return {1, 0, 1};
  const Real* real = real_nccl();
  if (real == nullptr || real->call.TeamCft == nullptr) return moeccl_no_team();
  const InReal inside;
  return real->call.TeamCft(target.real, mode);
}
ncclTeam_t TeamCftMultimem(ncclComm_t comm) {
  return team_of("ncclTeamCftMultimem", comm, &moecclNcclTable::TeamCftMultimem, true);
}

int TeamRankToWorld(ncclComm_t comm, ncclTeam_t team, int rank) {
  Target target;
  if (resolve("ncclTeamRankToWorld", comm, &target) != ncclSuccess) return -1;
  if (target.real == nullptr) return target.ours->rank + (rank - team.rank) * team.stride;
  const Real* real = real_nccl();
  return real != nullptr && real->call.TeamRankToWorld != nullptr ? real->call.TeamRankToWorld(target.real, team, rank)
                                                                  : -1;
}

int TeamRankToLsa(ncclComm_t comm, ncclTeam_t team, int rank) {
  Target target;
  if (resolve("ncclTeamRankToLsa", comm, &target) != ncclSuccess) return -1;
  if (target.real == nullptr) return (rank - team.rank) * team.stride;  // this rank is 0 of its team
  const Real* real = real_nccl();
  return real != nullptr && real->call.TeamRankToLsa != nullptr ? real->call.TeamRankToLsa(target.real, team, rank)
                                                                : -1;
}

ncclResult_t GinBarrierCreateRequirement(ncclComm_t comm, ncclTeam_t team, int n_barriers,
                                         ncclGinBarrierHandle_t* handle, ncclDevResourceRequirements_t* requirement) {
  Target target;
  const ncclResult_t result = resolve("ncclGinBarrierCreateRequirement", comm, &target);
  if (result != ncclSuccess) return result;
  if (target.real == nullptr) return no_device_api("ncclGinBarrierCreateRequirement");
  return MOECCL_FORWARD(GinBarrierCreateRequirement, target.real, team, n_barriers, handle, requirement);
}

// Windows name their communicators. A window that is not one of ours is NCCL's.
ncclResult_t GetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void** pointer) {
  if (is_our_window(window)) return no_device_api("ncclGetLsaMultimemDevicePointer");
  return MOECCL_FORWARD(GetLsaMultimemDevicePointer, window, offset, pointer);
}

ncclResult_t GetMultimemDevicePointer(ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem,
                                      void** pointer) {
  if (is_our_window(window)) return no_device_api("ncclGetMultimemDevicePointer");
  return MOECCL_FORWARD(GetMultimemDevicePointer, window, offset, multimem, pointer);
}

ncclResult_t GetLsaDevicePointer(ncclWindow_t window, size_t offset, int lsa_rank, void** pointer) {
  if (is_our_window(window)) return no_device_api("ncclGetLsaDevicePointer");
  return MOECCL_FORWARD(GetLsaDevicePointer, window, offset, lsa_rank, pointer);
}

ncclResult_t GetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void** pointer) {
  if (is_our_window(window)) return no_device_api("ncclGetPeerDevicePointer");
  return MOECCL_FORWARD(GetPeerDevicePointer, window, offset, peer, pointer);
}

ncclResult_t GetMultimemDeviceLeInfo(ncclWindow_t window, size_t offset, ncclCftLeId* id, size_t* id_offset) {
  if (is_our_window(window)) return no_device_api("ncclGetMultimemDeviceLeInfo");
  return MOECCL_FORWARD(GetMultimemDeviceLeInfo, window, offset, id, id_offset);
}

ncclResult_t GetCftDeviceLeInfo(ncclWindow_t window, size_t offset, int peer, ncclTeam_t team, ncclCftLeId* id,
                                size_t* id_offset) {
  if (is_our_window(window)) return no_device_api("ncclGetCftDeviceLeInfo");
  return MOECCL_FORWARD(GetCftDeviceLeInfo, window, offset, peer, team, id, id_offset);
}

ncclResult_t GetPeerDeviceLeInfo(ncclWindow_t window, size_t offset, int peer, ncclCftLeId* id, size_t* id_offset) {
  if (is_our_window(window)) return no_device_api("ncclGetPeerDeviceLeInfo");
  return MOECCL_FORWARD(GetPeerDeviceLeInfo, window, offset, peer, id, id_offset);
}

// These name no communicator, and only NCCL's device interface uses their results.
ncclResult_t GinOutboxCreateRequirement(int n_blocks, int log2_bytes, ncclGinOutboxHandle* handle,
                                        ncclDevResourceRequirements_t* requirement) {
  if (real_nccl() == nullptr) return no_device_api("ncclGinOutboxCreateRequirement");
  return MOECCL_FORWARD(GinOutboxCreateRequirement, n_blocks, log2_bytes, handle, requirement);
}

ncclResult_t GinInboxA2ACreateRequirement(ncclTeam_t peers, int n_blocks, int log2_bytes, ncclGinInboxA2AHandle* handle,
                                          ncclDevResourceRequirements_t* requirement) {
  if (real_nccl() == nullptr) return no_device_api("ncclGinInboxA2ACreateRequirement");
  return MOECCL_FORWARD(GinInboxA2ACreateRequirement, peers, n_blocks, log2_bytes, handle, requirement);
}

ncclResult_t LsaBarrierCreateRequirement(ncclTeam_t team, int n_barriers, ncclLsaBarrierHandle_t* handle,
                                         ncclDevResourceRequirements_t* requirement) {
  if (real_nccl() == nullptr) return no_device_api("ncclLsaBarrierCreateRequirement");
  return MOECCL_FORWARD(LsaBarrierCreateRequirement, team, n_barriers, handle, requirement);
}

ncclResult_t CftBarrierCreateRequirement(ncclTeam_t team, int n_barriers, ncclCftBarrierHandle_t* handle,
                                         ncclDevResourceRequirements_t* requirement) {
  if (real_nccl() == nullptr) return no_device_api("ncclCftBarrierCreateRequirement");
  return MOECCL_FORWARD(CftBarrierCreateRequirement, team, n_barriers, handle, requirement);
}

int LLA2ACalcSlots(int max_elements, int max_element_size) {
  const Real* real = real_nccl();
  if (real != nullptr && real->call.LLA2ACalcSlots != nullptr) {
    return real->call.LLA2ACalcSlots(max_elements, max_element_size);
  }
  (void)no_device_api("ncclLLA2ACalcSlots");
  return 0;
}

ncclResult_t LLA2ACreateRequirement(int n_blocks, int n_slots, ncclLLA2AHandle_t* handle,
                                    ncclDevResourceRequirements_t* requirement) {
  if (real_nccl() == nullptr) return no_device_api("ncclLLA2ACreateRequirement");
  return MOECCL_FORWARD(LLA2ACreateRequirement, n_blocks, n_slots, handle, requirement);
}

}  // namespace core
}  // namespace moeccl::shim
