// SPDX-License-Identifier: Apache-2.0
// Entry points of comm.h.
#include "moeccl/comm.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "src/api/convert.h"
#include "src/api/join.h"
#include "src/base/env.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/launcher.h"
#include "src/calibrate/calibrate.h"
#include "src/comm/collective.h"
#include "src/comm/group.h"
#include "src/comm/split.h"
#include "src/world/heap.h"

using namespace moeccl;
using api::CommTable;
using api::join;
using api::StreamTable;
using api::with_comm;
using api::with_pinned;
using comm::Communicator;

Status api::join(const moecclUniqueId& id, int n_ranks, int rank, const comm::Config& config, moecclComm_t* out,
                 const comm::Parent& parent) {
  MOECCL_ASSIGN_OR_RETURN(auto made, Communicator::init(id, n_ranks, rank, config, parent));
  if (const Status profiled = contained([&] { return comm::profile_at_init(*made, parent.grows); }); !profiled.ok()) {
    made->break_off(profiled);  // peers may be done and would wait for this rank in their first operation
    return profiled;
  }
  MOECCL_ASSIGN_OR_RETURN(*out, CommTable::get().add(std::move(made)));
  return {};
}

namespace {

Status check_n_ranks(int n_ranks) {
  if (n_ranks >= 1 && n_ranks <= bootstrap::kMaxRanks) return {};
  return error(moecclInvalidArgument, "n_ranks is {}: give 1 to {}", n_ranks, bootstrap::kMaxRanks);
}

Status init_rank(moecclComm_t* out, int n_ranks, const moecclUniqueId& id, int rank, const moecclConfig_t* given) {
  MOECCL_TRY(api::clear(out, "comm", "the address of a moecclComm_t"));
  MOECCL_TRY(check_n_ranks(n_ranks));
  if (rank < 0 || rank >= n_ranks) return error(moecclInvalidArgument, "rank is {}: give 0 to {}", rank, n_ranks - 1);
  MOECCL_ASSIGN_OR_RETURN(const comm::Config config, comm::Config::from(given));
  comm::Group& group = comm::Group::of_this_thread();
  if (!group.open()) return join(id, n_ranks, rank, config, out);
  group.add_join([=] { return join(id, n_ranks, rank, config, out); });
  return {};
}

// An id that the first join makes, so that a group without joins leaves no meeting point.
class IdOfJoins {
 public:
  Result<moecclUniqueId> get() {
    const std::lock_guard lock(mutex_);
    if (!made_) made_ = bootstrap::make_unique_id();
    return *made_;
  }

 private:
  std::mutex mutex_;
  std::optional<Result<moecclUniqueId>> made_;
};

Status init_all(moecclComm_t* comms, int n_ranks, const moecclConfig_t* given) {
  if (comms == nullptr) return api::null_argument("comms", "an array of n_ranks moecclComm_t");
  MOECCL_TRY(check_n_ranks(n_ranks));
  std::fill_n(comms, n_ranks, nullptr);
  MOECCL_ASSIGN_OR_RETURN(const comm::Config config, comm::Config::from(given));
  const auto shared = std::make_shared<IdOfJoins>();
  comm::Group& group = comm::Group::of_this_thread();
  group.start();
  // Nothing may be thrown past the group's end, which would leave the thread's later calls in the group.
  const Status status = contained([&]() -> Status {
    for (int r = 0; r < n_ranks; ++r) {
      group.add_join([=]() -> Status {
        MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId id, shared->get());
        return join(id, n_ranks, r, config, &comms[r]);
      });
    }
    return {};
  });
  if (!status.ok()) group.poison(status);
  Status ended = group.end();  // returns no result yet if this is part of another group
  return status.ok() ? std::move(ended) : status;
}

Status init_env(moecclComm_t* out, const moecclConfig_t* given) {
  MOECCL_TRY(api::clear(out, "comm", "the address of a moecclComm_t"));
  MOECCL_TRY(api::outside_groups("moecclCommInitEnv"));
  MOECCL_ASSIGN_OR_RETURN(const comm::Config config, comm::Config::from(given));
  MOECCL_ASSIGN_OR_RETURN(const bootstrap::LauncherInfo info, bootstrap::detect_launcher());
  comm::Parent from;
  from.until = Deadline::after_ms(config.init_timeout_ms);
  from.ask_again = [&info, until = from.until] { return bootstrap::meet_from_environment(info, until); };
  MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId id, from.ask_again());
  return join(id, info.n_ranks, info.rank, config, out, from);
}

// Reads one figure of a communicator.
template <class T, class Figure>
moecclResult_t ask(moecclComm_t handle, T* out, const char* name, const char* wanted, Figure figure) {
  return with_comm<api::kLocal>(handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(api::require(out, name, wanted));
    *out = static_cast<T>((comm.*figure)());
    return {};
  });
}

}  // namespace

moecclResult_t moecclGetUniqueId(moecclUniqueId* id) {
  return api::guarded(nullptr, [&]() -> Status {
    if (id == nullptr) return api::null_argument("id", "the address of a moecclUniqueId");
    MOECCL_TRY(env_status());
    MOECCL_ASSIGN_OR_RETURN(*id, bootstrap::make_unique_id());
    return {};
  });
}

moecclResult_t moecclCommInitRank(moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank) {
  return api::member_of_group(api::guarded(nullptr, [&] { return init_rank(comm, n_ranks, id, rank, nullptr); }));
}

moecclResult_t moecclCommInitRankConfig(moecclComm_t* comm, int n_ranks, moecclUniqueId id, int rank,
                                        const moecclConfig_t* config) {
  return api::member_of_group(api::guarded(nullptr, [&] { return init_rank(comm, n_ranks, id, rank, config); }));
}

moecclResult_t moecclCommInitAll(moecclComm_t* comms, int n_ranks, const moecclConfig_t* config) {
  return api::member_of_group(api::guarded(nullptr, [&] { return init_all(comms, n_ranks, config); }));
}

moecclResult_t moecclCommInitEnv(moecclComm_t* comm, const moecclConfig_t* config) {
  return api::member_of_group(api::guarded(nullptr, [&] { return init_env(comm, config); }));
}

moecclResult_t moecclCommSplit(moecclComm_t handle, int color, int key, moecclComm_t* new_comm,
                               const moecclConfig_t* config) {
  return api::collective(handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(api::outside_groups("moecclCommSplit"));
    MOECCL_TRY(api::clear(new_comm, "new_comm", "the address of a moecclComm_t"));
    MOECCL_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made, comm::split(comm, color, key, config));
    if (made == nullptr) return {};
    MOECCL_ASSIGN_OR_RETURN(*new_comm, CommTable::get().add(std::move(made)));
    return {};
  });
}

moecclResult_t moecclCommFinalize(moecclComm_t handle) {
  return with_comm<api::kLocal>(handle, [](Communicator& comm) -> Status {
    comm.wait_idle();
    return comm.usable();
  });
}

moecclResult_t moecclCommDestroy(moecclComm_t handle) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::not_in_group<CommTable>(handle, "communicator"));
    return api::destroy<CommTable>(handle, {"comm", "communicator"}, [](Communicator& comm) { comm.wait_idle(); });
  });
}

moecclResult_t moecclCommAbort(moecclComm_t handle) {
  return with_pinned(handle, [](Communicator& comm) -> Status {
    comm.abort();
    return {};
  });
}

moecclResult_t moecclCommGetAsyncError(moecclComm_t handle, moecclResult_t* result) {
  return with_pinned<api::kLocal>(handle, [&](Communicator& comm) -> Status {
    if (result == nullptr) return api::null_argument("result", "the address of a moecclResult_t");
    comm.notice_peers();
    const bool settled = comm.settled();  // read first, so that failures up to then are seen below
    const Status s = comm.usable();
    if (!s.ok()) comm.set_last_error(s.message());
    *result = !s.ok() ? s.code() : settled ? moecclSuccess : moecclInProgress;
    return {};
  });
}

moecclResult_t moecclCommSetPriority(moecclComm_t handle, int priority) {
  return api::with_comm<api::kLocal>(handle, [&](Communicator& c) -> Status {
    if (priority < 0 || priority > MOECCL_HIGHEST_PRIORITY)
      return error(moecclInvalidArgument, "priority is {}: give a moecclPriority_t, or a number up to {}", priority,
                   MOECCL_HIGHEST_PRIORITY);
    c.set_priority(priority);
    return {};
  });
}

moecclResult_t moecclCommCount(moecclComm_t handle, int* count) {
  return ask(handle, count, "count", "the address of an int", &Communicator::n_ranks);
}

moecclResult_t moecclCommUserRank(moecclComm_t handle, int* rank) {
  return ask(handle, rank, "rank", "the address of an int", &Communicator::rank);
}

moecclResult_t moecclCommMemoryUsage(moecclComm_t handle, size_t* bytes) {
  return ask(handle, bytes, "bytes", "the address of a size_t", &Communicator::memory_bytes);
}

moecclResult_t moecclMemAlloc(void** ptr, size_t bytes) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::clear(ptr, "ptr", "the address of a pointer"));
    MOECCL_ASSIGN_OR_RETURN(comm::SymmetricHeap * heap, comm::SymmetricHeap::process_heap());
    MOECCL_ASSIGN_OR_RETURN(*ptr, heap->allocate(bytes));
    return {};
  });
}

moecclResult_t moecclMemFree(void* ptr) {
  return api::guarded(nullptr, [&]() -> Status {
    if (ptr == nullptr || comm::SymmetricHeap::inherited(ptr)) return {};
    MOECCL_ASSIGN_OR_RETURN(comm::SymmetricHeap * heap, comm::SymmetricHeap::process_heap());
    return heap->release(ptr);
  });
}

moecclResult_t moecclCommRegister(moecclComm_t handle, void* ptr, size_t bytes, void** registration) {
  return with_comm<api::kLocal>(handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(api::clear(registration, "handle", "the address of a pointer"));
    MOECCL_ASSIGN_OR_RETURN(*registration, comm.announce(ptr, bytes));
    return {};
  });
}

moecclResult_t moecclCommDeregister(moecclComm_t handle, void* registration) {
  return with_comm<api::kLocal>(handle, [&](Communicator& comm) { return comm.forget(registration); });
}

moecclResult_t moecclStreamCreate(moecclStream_t* stream) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::clear(stream, "stream", "the address of a moecclStream_t"));
    MOECCL_ASSIGN_OR_RETURN(*stream, StreamTable::get().add(std::make_unique<comm::HostStream>()));
    return {};
  });
}

moecclResult_t moecclStreamSynchronize(moecclStream_t handle) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_ASSIGN_OR_RETURN(comm::Stream* const stream, api::find_stream(handle, nullptr));
    return stream == nullptr ? Status() : stream->synchronize();  // calls on the NULL stream have finished
  });
}

moecclResult_t moecclStreamDestroy(moecclStream_t handle) {
  return api::guarded(nullptr, [&]() -> Status {
    MOECCL_TRY(api::not_in_group<StreamTable>(handle, "stream"));
    return api::destroy<StreamTable>(handle, {"stream", "stream"}, [](comm::HostStream&) {});
  });
}

moecclResult_t moecclGroupStart(void) {
  return api::guarded(nullptr, [] { return comm::Group::of_this_thread().start(), Status(); });
}

moecclResult_t moecclGroupEnd(void) {
  return api::guarded(nullptr, [] { return comm::Group::of_this_thread().end(); });
}

moecclResult_t moecclGroupCancel(void) {
  return api::guarded(nullptr, []() -> Status {
    if (comm::Group::of_this_thread().cancel()) return {};
    return error(moecclInvalidUsage, "moecclGroupCancel without moecclGroupStart");
  });
}

moecclResult_t moecclRedOpCreatePreMulSum(moecclRedOp_t* op, const void* scalar, moecclDataType_t type,
                                          moecclComm_t handle) {
  return api::with_pinned<api::kLocal>(handle,
                                       [&](Communicator& comm) { return comm::create_premul(comm, scalar, type, op); });
}

moecclResult_t moecclRedOpDestroy(moecclRedOp_t op, moecclComm_t handle) {
  return api::with_pinned<api::kLocal>(handle, [&](Communicator& comm) { return comm::destroy_premul(comm, op); });
}
