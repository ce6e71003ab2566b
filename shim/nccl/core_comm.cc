// SPDX-License-Identifier: Apache-2.0
// Communicators: making, splitting, shrinking, suspending, ending and asking.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <future>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "shim/nccl/core.h"
#include "shim/nccl/device.h"
#include "shim/nccl/join.h"
#include "src/base/blocked_signals.h"

namespace moeccl::shim {
namespace {

ncclResult_t null_out(const char* function, const char* name) {
  return fail(ncclInvalidArgument, std::string(function) + ": " + name + " is NULL: give the address of a variable");
}

CommPtr new_comm(const InitConfig& config, int device) {
  auto comm = std::make_shared<Comm>();
  comm->device = device;
  comm->blocking = config.blocking();
  comm->graph_mixing = config.graph_mixing();
  comm->name = config.name;
  return comm;
}

// A communicator that is to be made from another one. Without a config it is like that one.
CommPtr new_comm_of(const Comm& parent, const InitConfig& config) {
  CommPtr comm = new_comm(config, parent.device);
  if (!config.set) comm->blocking = parent.blocking, comm->graph_mixing = parent.graph_mixing;
  if (comm->name.empty()) comm->name = parent.name;
  return comm;
}

ncclResult_t init_rank(const char* function, ncclComm_t* out, int n_ranks, const ncclUniqueId& id, int rank,
                       const ncclConfig_t* given, int device) {
  if (out == nullptr) return fail_group(null_out(function, "comm"));
  *out = nullptr;
  if (n_ranks < 1 || rank < 0 || rank >= n_ranks) {
    return fail_group(fail(ncclInvalidArgument, std::string(function) + ": rank " + std::to_string(rank) + " of " +
                                                    std::to_string(n_ranks) + ": give 0 <= rank < nranks"));
  }
  InitConfig config;
  const ncclResult_t result = InitConfig::from(function, given, &config);
  if (result != ncclSuccess) return fail_group(result);
  return start({new_comm(config, device), out, [=](Comm& comm) { return join(comm, n_ranks, id, rank, config); }});
}

// For ids that NCCL made itself: the job was handed to NCCL when rank 0 asked for the id.
ncclResult_t init_real(ncclComm_t* out, int n_ranks, const ncclUniqueId& id, int rank, ncclConfig_t* config) {
  return forward_in_group([&] {
    // Not every version understands the config of a later nccl.h; without a config, the oldest entry point does.
    return config != nullptr ? MOECCL_FORWARD(CommInitRankConfig, out, n_ranks, id, rank, config)
                             : MOECCL_FORWARD(CommInitRank, out, n_ranks, id, rank);
  });
}

// A device that does not exist would fail after the other ranks have begun to wait. Without CUDA, devices make no
// difference.
ncclResult_t check_devices(int n_devices, const int* devices) {
  const int there = device::count();
  if (there == 0) return ncclSuccess;
  if (devices == nullptr && n_devices > there) {
    return fail(ncclInvalidArgument, "ncclCommInitAll: ndev is " + std::to_string(n_devices) +
                                         " without devlist: give at most " + std::to_string(there) +
                                         ", the number of devices, or a devlist");
  }
  for (int r = 0; devices != nullptr && r < n_devices; ++r) {
    if (devices[r] >= 0 && devices[r] < there) continue;
    return fail(ncclInvalidArgument, "ncclCommInitAll: devlist[" + std::to_string(r) + "] is " +
                                         std::to_string(devices[r]) + ": give 0 <= device < " + std::to_string(there));
  }
  return ncclSuccess;
}

// Returns whether its operations have been ended: by an abort, or by any rank's revocation.
bool was_aborted(const Comm& comm) {
  moecclResult_t state = moecclSuccess;
  return comm.ours != nullptr && moecclCommGetAsyncError(comm.ours, &state) == moecclSuccess && state == moecclAborted;
}

ncclResult_t split(Comm& parent, int color, int key, Comm& comm) {
  const ShimConfig config = config_of(comm);
  const auto split_from = [&](moecclComm_t whole) {
    return moecclCommSplit(whole, color, key, &comm.ours, &config.config);
  };
  const auto finish = [&](ncclResult_t result) {
    return result == ncclSuccess && comm.ours != nullptr ? adopt(comm) : result;
  };
  const auto ended = [&] { return comm.cancelled || (parent.given_up && !parent.revoked); };
  // Another rank may have revoked it, or may do so while this one waits, and then splits by the other way.
  moecclResult_t done = moecclAborted;
  if (!ended() && !parent.revoked && !was_aborted(parent)) done = split_from(parent.ours);
  if (done != moecclAborted) return finish(from_moeccl(done));
  if (ended()) return fail(ncclInvalidUsage, "the communicator, or the one it is split from, was aborted");
  moecclComm_t again = nullptr;
  ncclResult_t result = from_moeccl(moecclCommShrink(parent.ours, nullptr, 0, &again, &config.config, 0));
  if (result != ncclSuccess) return result;
  works_on(comm, again);
  result = from_moeccl(split_from(again));
  works_on(comm, nullptr);
  (void)moecclCommDestroy(again);
  return finish(result);
}

ncclResult_t shrink(Comm& parent, const std::vector<int>& excluded, int flags, Comm& comm) {
  static_assert(NCCL_SHRINK_DEFAULT == MOECCL_SHRINK_DEFAULT && NCCL_SHRINK_ABORT == MOECCL_SHRINK_ABORT);
  const ShimConfig config = config_of(comm);
  const ncclResult_t result = from_moeccl(moecclCommShrink(
      parent.ours, excluded.data(), static_cast<int>(excluded.size()), &comm.ours, &config.config, flags));
  return result == ncclSuccess ? adopt(comm) : result;
}

struct Growth {
  int n_ranks = 0, rank = -1;  // a rank of the old communicator gives -1
  std::optional<moecclUniqueId> id = {};
  InitConfig config = {};
};

// `parent` is null on a new rank.
ncclResult_t grow(moecclComm_t parent, const Growth& to, Comm& comm) {
  const ShimConfig config = config_of(comm);
  const ncclResult_t result =
      from_moeccl(moecclCommGrow(parent, to.n_ranks, to.id ? &*to.id : nullptr, to.rank, &comm.ours, &config.config));
  return result == ncclSuccess ? settle(comm, to.config) : result;
}

// Returns true if the communicator is still being made: the thread that does so frees it, soon after an abort.
bool leave_to_its_maker(Comm& comm, bool abort) {
  {
    const std::lock_guard lock(comm.mutex);
    if (comm.state.load() != ncclInProgress) return false;
    comm.abandoned = true;
    if (abort) orphan(comm);
  }
  if (abort) cancel(comm);
  return true;
}

// Frees a communicator that was aborted or revoked, once nothing uses it any more. A group of another thread uses it
// until the group's other communicators have ended too, which the program may abort next: that is not waited for.
// `busy`: some of its operations may not have ended.
void free_ended(CommPtr comm, bool busy) {
  constexpr std::chrono::milliseconds kEnds(3000);  // its operations, and then its memory, wait for peers for a second
  constexpr std::chrono::milliseconds kStops(100);  // its own part of the group does nothing any more
  const std::chrono::milliseconds wait = busy && others_go_on(*comm) ? kStops : kEnds;
  auto freed = std::make_shared<std::promise<void>>();
  const std::future<void> done = freed->get_future();
  const auto finish = [freed](CommPtr& c) {
    wait_unused(*c);
    (void)contained([&] { return free_comm(*c); });
    c = nullptr;
    freed->set_value();
  };
  try {
    const BlockedSignals blocked;
    std::thread([finish, c = comm]() mutable { finish(c); }).detach();
  } catch (const std::exception&) {
    finish(comm);
  }
  (void)done.wait_for(wait);
}

// Returns whether some of its operations may not have ended. After a failure or a revocation that is not known.
bool may_be_busy(const Comm& comm) {
  moecclResult_t state = moecclSuccess;
  return comm.ours != nullptr && moecclCommGetAsyncError(comm.ours, &state) == moecclSuccess && state != moecclSuccess;
}

// Destroys the communicator, or aborts what MoECCL runs on it. NCCL's abort is NCCL's own.
ncclResult_t end(ncclComm_t handle, const char* function, bool abort) {
  if (handle == nullptr) return ncclSuccess;  // as in NCCL
  CommPtr comm = withdraw(handle);
  if (comm == nullptr) {
    Target target;
    const ncclResult_t result = resolve(function, handle, &target);
    if (result != ncclSuccess) return result;
    return forward_in_group(
        [&] { return abort ? MOECCL_FORWARD(CommAbort, handle) : MOECCL_FORWARD(CommDestroy, handle); });
  }
  if (comm->process != getpid()) {  // inherited: its ranks are the parent process's, which go on
    if (comm->ours != nullptr) (void)moecclCommDestroy(comm->ours);
    return ncclSuccess;
  }
  if (leave_to_its_maker(*comm, abort)) return ncclSuccess;
  if (comm->real != nullptr && abort) {
    return forward_in_group([&] { return MOECCL_FORWARD(CommAbort, std::exchange(comm->real, nullptr)); });
  }
  comm->given_up = true;
  const bool busy = may_be_busy(*comm);
  // What was to be made from it may still wait for its other ranks.
  if (abort) cancel_making_from(*comm);
  const bool ends = abort || comm->orphans.load(std::memory_order_acquire) > 0;  // released by orphan()
  if (ends && comm->ours != nullptr) (void)moecclCommAbort(comm->ours);
  drop_jobs_from(*comm);
  if (abort && group_open()) {
    // What still uses it may end only when the group's other communicators have been aborted too.
    after_group([comm, busy] { free_ended(comm, busy); });
    return ncclSuccess;
  }
  if (abort || was_aborted(*comm)) {
    free_ended(comm, busy);
    return ncclSuccess;  // its operations end in an error, as they should
  }
  wait_unused(*comm);
  return free_comm(*comm);
}

}  // namespace

namespace core {

ncclResult_t CommInitRank(ncclComm_t* comm, int n_ranks, ncclUniqueId id, int rank) {
  if (!is_moeccl_id(id)) return init_real(comm, n_ranks, id, rank, nullptr);
  return init_rank("ncclCommInitRank", comm, n_ranks, id, rank, nullptr, device::current());
}

ncclResult_t CommInitRankConfig(ncclComm_t* comm, int n_ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (!is_moeccl_id(id)) return init_real(comm, n_ranks, id, rank, config);
  return init_rank("ncclCommInitRankConfig", comm, n_ranks, id, rank, config, device::current());
}

ncclResult_t CommInitRankScalable(ncclComm_t* comm, int n_ranks, int rank, int n_ids, ncclUniqueId* ids,
                                  ncclConfig_t* config) {
  if (ids == nullptr || n_ids < 1) {
    return fail_group(fail(ncclInvalidArgument, "ncclCommInitRankScalable: give at least one id"));
  }
  if (!is_moeccl_id(ids[0])) {
    return forward_in_group(
        [&] { return MOECCL_FORWARD(CommInitRankScalable, comm, n_ranks, rank, n_ids, ids, config); });
  }
  if (n_ids > n_ranks) {
    return fail_group(fail(ncclInvalidArgument, "ncclCommInitRankScalable: " + std::to_string(n_ids) + " ids for " +
                                                    std::to_string(n_ranks) + " ranks: give at most one for each"));
  }
  // One meeting point serves them all; those of the other ids end by themselves.
  return init_rank("ncclCommInitRankScalable", comm, n_ranks, ids[0], rank, config, device::current());
}

ncclResult_t CommInitAll(ncclComm_t* comms, int n_devices, const int* devices) {
  if (comms == nullptr) return fail_group(null_out("ncclCommInitAll", "comm"));
  if (n_devices < 1) {
    return fail_group(
        fail(ncclInvalidArgument, "ncclCommInitAll: ndev is " + std::to_string(n_devices) + ": give 1 or more"));
  }
  std::string reason;
  if (wants_nccl(&reason) && real_nccl() != nullptr) {
    if (const ncclResult_t refused = refuse_unencrypted(reason); refused != ncclSuccess) return refused;
    notice("forwards NCCL calls to " + real_nccl()->path + ": " + reason);
    return forward_in_group([&] { return MOECCL_FORWARD(CommInitAll, comms, n_devices, devices); });
  }
  if (const ncclResult_t refused = check_devices(n_devices, devices); refused != ncclSuccess)
    return fail_group(refused);
  ncclUniqueId id;
  ncclResult_t result = make_id(&id, false);
  if (result != ncclSuccess) return result;
  group_start();
  for (int r = 0; r < n_devices && result == ncclSuccess; ++r) {
    const int device = !device::present() ? -1 : devices != nullptr ? devices[r] : r;
    result = init_rank("ncclCommInitAll", &comms[r], n_devices, id, r, nullptr, device);
  }
  const ncclResult_t ended = group_end(nullptr);
  return result != ncclSuccess ? result : ended;
}

ncclResult_t CommFinalize(ncclComm_t comm) {
  if (comm == nullptr) return ncclSuccess;  // as in NCCL
  MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, Need::kUsable, CommFinalize, target.real);
  if (target.ours->revoked)
    return fail(ncclInvalidArgument, "ncclCommFinalize: the communicator was revoked: destroy it");
  if (target.ours->finalized.exchange(true))
    return fail(ncclInvalidArgument, "ncclCommFinalize: it was called before: destroy the communicator");
  return from_moeccl(moecclCommFinalize(target.ours->ours));
}

ncclResult_t CommDestroy(ncclComm_t comm) { return end(comm, "ncclCommDestroy", false); }
ncclResult_t CommAbort(ncclComm_t comm) { return end(comm, "ncclCommAbort", true); }

ncclResult_t CommRevoke(ncclComm_t comm, int flags) {
  if (comm == nullptr) return ncclSuccess;  // as in NCCL
  MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, Need::kMade, CommRevoke, target.real, flags);
  if (flags != NCCL_REVOKE_DEFAULT) return fail(ncclInvalidArgument, "ncclCommRevoke: give NCCL_REVOKE_DEFAULT");
  if (target.ours->finalized) return fail(ncclInvalidArgument, "ncclCommRevoke: the communicator was finalized");
  if (target.ours->revoked.exchange(true))
    return fail(ncclInvalidArgument, "ncclCommRevoke: it was called before: split, shrink or destroy the communicator");
  target.ours->given_up = true;
  return from_moeccl(moecclCommRevoke(target.ours->ours));
}

ncclResult_t CommSuspend(ncclComm_t comm, int flags) {
  MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, Need::kUsable, CommSuspend, target.real, flags);
  if (flags != NCCL_SUSPEND_MEM) {
    return fail(ncclInvalidArgument, "ncclCommSuspend: flags is " + std::to_string(flags) + ": give NCCL_SUSPEND_MEM");
  }
  // Its memory stays, because peers access it, but no operation is left on it and none begins.
  const ncclResult_t idle = from_moeccl(moecclCommFinalize(target.ours->ours));
  if (idle == ncclSuccess) target.ours->suspended = true;
  return idle;
}

ncclResult_t CommResume(ncclComm_t comm) {
  MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, Need::kMade, CommResume, target.real);
  if (!target.ours->suspended.exchange(false)) {
    return fail(ncclInvalidUsage, "ncclCommResume: the communicator is not suspended");
  }
  return ncclSuccess;
}

ncclResult_t CommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out, ncclConfig_t* given) {
  if (out == nullptr) return fail_group(null_out("ncclCommSplit", "newcomm"));
  MOECCL_OURS_OR_FAIL_GROUP(target, comm, Need::kUsable, CommSplit, target.real, color, key, out, given);
  *out = nullptr;
  if (color < NCCL_SPLIT_NOCOLOR) {
    return fail_group(fail(ncclInvalidArgument, "ncclCommSplit: color is " + std::to_string(color) +
                                                    ": give 0 or more, or NCCL_SPLIT_NOCOLOR to join none"));
  }
  InitConfig config;
  const ncclResult_t result = InitConfig::from("ncclCommSplit", given, &config);
  if (result != ncclSuccess) return fail_group(result);
  const CommPtr made = new_comm_of(*target.ours, config);
  const auto parent = std::make_shared<Held>(std::move(target.ours));
  return start({.comm = made,
                .out = out,
                .work = [parent, color, key](Comm& c) { return split(**parent, color, key, c); },
                .parent = parent,
                .joins = color != NCCL_SPLIT_NOCOLOR,
                .is_part = true});
}

ncclResult_t CommShrink(ncclComm_t comm, int* excluded, int n_excluded, ncclComm_t* out, ncclConfig_t* given,
                        int flags) {
  if (out == nullptr) return fail_group(null_out("ncclCommShrink", "newcomm"));
  MOECCL_OURS_OR_FAIL_GROUP(target, comm, Need::kUsable, CommShrink, target.real, excluded, n_excluded, out, given,
                            flags);
  *out = nullptr;
  if (excluded == nullptr || n_excluded < 1) {
    return fail_group(fail(ncclInvalidArgument, "ncclCommShrink: give at least one rank to exclude"));
  }
  if (flags != NCCL_SHRINK_DEFAULT && flags != NCCL_SHRINK_ABORT) {
    return fail_group(fail(ncclInvalidArgument, "ncclCommShrink: give NCCL_SHRINK_DEFAULT or NCCL_SHRINK_ABORT"));
  }
  InitConfig config;
  const ncclResult_t result = InitConfig::from("ncclCommShrink", given, &config);
  if (result != ncclSuccess) return fail_group(result);
  const std::vector<int> list(excluded, excluded + n_excluded);
  const CommPtr made = new_comm_of(*target.ours, config);
  const auto parent = std::make_shared<Held>(std::move(target.ours));
  return start({.comm = made,
                .out = out,
                .work = [parent, list, flags](Comm& c) { return shrink(**parent, list, flags, c); },
                .parent = parent,
                .is_part = true});
}

ncclResult_t CommGetUniqueId(ncclComm_t comm, ncclUniqueId* id) {
  if (id == nullptr) return null_out("ncclCommGetUniqueId", "uniqueId");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kUsable, CommGetUniqueId, target.real, id);
  moecclUniqueId made;
  const ncclResult_t asked = from_moeccl(moecclCommGetUniqueId(target.ours->ours, &made));
  if (asked == ncclSuccess) std::memcpy(id, &made, sizeof *id);
  return asked;
}

ncclResult_t CommGrow(ncclComm_t comm, int n_ranks, const ncclUniqueId* id, int rank, ncclComm_t* out,
                      ncclConfig_t* given) {
  if (out == nullptr) return fail_group(null_out("ncclCommGrow", "newcomm"));
  Growth to{.n_ranks = n_ranks, .rank = rank};
  if (id != nullptr) std::memcpy(&to.id.emplace(), id, sizeof *id);
  if (comm == nullptr) {
    if (id == nullptr) return fail_group(null_out("ncclCommGrow", "uniqueId (of a new rank)"));
    if (!is_moeccl_id(*id))
      return forward_in_group([&] { return MOECCL_FORWARD(CommGrow, comm, n_ranks, id, rank, out, given); });
    *out = nullptr;
    const ncclResult_t read = InitConfig::from("ncclCommGrow", given, &to.config);
    if (read != ncclSuccess) return fail_group(read);
    return start({new_comm(to.config, device::current()), out, [to](Comm& c) { return grow(nullptr, to, c); }});
  }
  MOECCL_OURS_OR_FAIL_GROUP(target, comm, Need::kUsable, CommGrow, target.real, n_ranks, id, rank, out, given);
  *out = nullptr;
  if (n_ranks <= target.ours->n_ranks || rank != -1) {
    return fail_group(fail(ncclInvalidArgument, "ncclCommGrow: nRanks is " + std::to_string(n_ranks) + " and rank " +
                                                    std::to_string(rank) + ": give more than " +
                                                    std::to_string(target.ours->n_ranks) +
                                                    ", and -1 on ranks of the old one"));
  }
  const ncclResult_t result = InitConfig::from("ncclCommGrow", given, &to.config);
  if (result != ncclSuccess) return fail_group(result);
  const CommPtr made = new_comm_of(*target.ours, to.config);
  const auto parent = std::make_shared<Held>(std::move(target.ours));
  return start({.comm = made,
                .out = out,
                .work = [parent, to](Comm& c) { return grow((*parent)->ours, to, c); },
                .parent = parent});
}

ncclResult_t CommGetAsyncError(ncclComm_t comm, ncclResult_t* out) {
  if (out == nullptr) return null_out("ncclCommGetAsyncError", "asyncError");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kAny, CommGetAsyncError, target.real, out);
  *out = target.ours->state.load(std::memory_order_acquire);  // released by the thread that made it
  // It may have been handed to NCCL since resolve() looked.
  if (*out != ncclInProgress && target.ours->real != nullptr)
    return MOECCL_FORWARD(CommGetAsyncError, target.ours->real, out);
  const bool settled = target.ours->settled.load(std::memory_order_acquire);
  if (*out == ncclSuccess && (!settled || target.ours->children.load(std::memory_order_acquire) > 0))
    *out = ncclInProgress;
  if (*out != ncclSuccess || target.ours->revoked) return ncclSuccess;
  moecclResult_t state = moecclSuccess;
  const ncclResult_t asked = from_moeccl(moecclCommGetAsyncError(target.ours->ours, &state));
  // Operations on streams are neither an error nor a reason to wait: NCCL reports them as success.
  if (asked == ncclSuccess && state != moecclInProgress) *out = from_moeccl(state, target.ours->ours);
  return asked;
}

ncclResult_t CommCount(const ncclComm_t comm, int* count) {
  if (count == nullptr) return null_out("ncclCommCount", "count");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommCount, target.real, count);
  *count = target.ours->n_ranks;
  return ncclSuccess;
}

ncclResult_t CommCuDevice(const ncclComm_t comm, int* device) {
  if (device == nullptr) return null_out("ncclCommCuDevice", "device");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommCuDevice, target.real, device);
  *device = std::max(target.ours->device, 0);  // without CUDA, what a machine with one device would say
  return ncclSuccess;
}

ncclResult_t CommUserRank(const ncclComm_t comm, int* rank) {
  if (rank == nullptr) return null_out("ncclCommUserRank", "rank");
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommUserRank, target.real, rank);
  *rank = target.ours->rank;
  return ncclSuccess;
}

ncclResult_t CommQueryProperties(ncclComm_t comm, ncclCommProperties_t* properties) {
  MOECCL_OURS_OR_FORWARD(target, comm, Need::kMade, CommQueryProperties, target.real, properties);
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

}  // namespace core
}  // namespace moeccl::shim
