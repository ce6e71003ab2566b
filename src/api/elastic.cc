// SPDX-License-Identifier: Apache-2.0
// Entry points of elastic.h.
#include "moeccl/elastic.h"

#include <memory>
#include <utility>

#include "src/api/convert.h"
#include "src/api/join.h"
#include "src/base/env.h"
#include "src/base/shim_requests.h"
#include "src/bootstrap/bootstrap.h"
#include "src/bootstrap/place.h"
#include "src/comm/regroup.h"
#include "src/comm/split.h"

using namespace moeccl;
using api::CommTable;
using api::with_comm;
using comm::Communicator;

namespace {

Status shrink(Communicator& comm, const int* exclude, int n_exclude, moecclComm_t* out, const moecclConfig_t* config,
              int flags) {
  MOECCL_TRY(api::outside_groups("moecclCommShrink"));
  MOECCL_TRY(api::clear(out, "new_comm", "the address of a moecclComm_t"));
  if (n_exclude < 0) return error(moecclInvalidArgument, "n_exclude is {}: give 0 or more", n_exclude);
  if (n_exclude > 0) MOECCL_TRY(api::require(exclude, "exclude_ranks", "n_exclude ranks"));
  if (flags != MOECCL_SHRINK_DEFAULT && flags != MOECCL_SHRINK_ABORT) {
    return error(moecclInvalidArgument, "flags is {}: give MOECCL_SHRINK_DEFAULT or MOECCL_SHRINK_ABORT", flags);
  }
  MOECCL_ASSIGN_OR_RETURN(
      std::unique_ptr<Communicator> made,
      comm::shrink(comm, {exclude, static_cast<size_t>(n_exclude)}, config, flags == MOECCL_SHRINK_ABORT));
  MOECCL_ASSIGN_OR_RETURN(*out, CommTable::get().add(std::move(made)));
  return {};
}

// Grows the communicator, on one of its ranks.
Status grow(Communicator& parent, int n_ranks, const moecclUniqueId* given, int rank, moecclComm_t* out,
            const moecclConfig_t* config) {
  MOECCL_TRY(api::outside_groups("moecclCommGrow"));
  MOECCL_TRY(api::clear(out, "new_comm", "the address of a moecclComm_t"));
  if (rank != -1)
    return error(moecclInvalidArgument, "rank is {}: give -1 on the ranks of comm, which keep theirs", rank);
  if (n_ranks <= static_cast<int>(parent.n_ranks()) || n_ranks > bootstrap::kMaxRanks) {
    return error(moecclInvalidArgument, "n_ranks is {}: give more than comm's {}, up to {}", n_ranks, parent.n_ranks(),
                 bootstrap::kMaxRanks);
  }
  MOECCL_ASSIGN_OR_RETURN(comm::Config wanted, comm::config_of_part(parent, config));
  wanted.crowded = false;  // no rank is left out that would need the same cores
  MOECCL_ASSIGN_OR_RETURN(const moecclUniqueId id, comm::agree_on_id(parent, given));
  comm::Parent from;
  from.grows = true;
  from.still_wanted = [&] { return comm::still_wanted(parent); };
  from.others_alive = [&] { return comm::all_live(parent); };
  return api::join(id, n_ranks, static_cast<int>(parent.rank()), wanted, out, from);
}

// Joins a growing communicator as a new rank.
Status grow(int n_ranks, const moecclUniqueId* id, int rank, moecclComm_t* out, const moecclConfig_t* config) {
  MOECCL_TRY(api::outside_groups("moecclCommGrow"));
  MOECCL_TRY(api::clear(out, "new_comm", "the address of a moecclComm_t"));
  MOECCL_TRY(api::require(id, "id", "the id of moecclCommGetUniqueId, which a rank without comm needs"));
  if (n_ranks < 2 || n_ranks > bootstrap::kMaxRanks) {
    return error(moecclInvalidArgument, "n_ranks is {}: give 2 to {}", n_ranks, bootstrap::kMaxRanks);
  }
  if (rank < 1 || rank >= n_ranks) {
    return error(moecclInvalidArgument,
                 "rank is {}: a rank without comm gives a number after those of the old ranks, up to {}", rank,
                 n_ranks - 1);
  }
  // MOECCL_TOPOLOGY describes the ranks of the communicator that grows, which ignores it here too.
  MOECCL_ASSIGN_OR_RETURN(const comm::Config wanted, comm::Config::from(config, true));
  comm::Parent from;
  from.grows = true;
  return api::join(*id, n_ranks, rank, wanted, out, from);
}

// Makes an id with the meeting point that the shim asks for; see ShimIdRequest.
Status make_id_for_shim(moecclUniqueId* id) {
  MOECCL_TRY(env_status());
  const ShimIdRequest asks = ShimIdRequest::of(*id);
  const Deadline until = Deadline::after_ms(asks.timeout_ms > 0 ? asks.timeout_ms : env().init_timeout_ms);
  MOECCL_ASSIGN_OR_RETURN(*id, asks.place[0] != '\0' ? bootstrap::unique_id_of_place(asks.place, until)
                                                     : bootstrap::make_unique_id("", asks.timeout_ms));
  return {};
}

}  // namespace

moecclResult_t moecclCommShrink(moecclComm_t handle, const int* exclude_ranks, int n_exclude, moecclComm_t* new_comm,
                                const moecclConfig_t* config, int flags) {
  return api::collective(
      handle, [&](Communicator& comm) { return shrink(comm, exclude_ranks, n_exclude, new_comm, config, flags); });
}

moecclResult_t moecclCommGetUniqueId(moecclComm_t handle, moecclUniqueId* id) {
  if (handle == shim_asks_for_id() && id != nullptr) return api::guarded(nullptr, [&] { return make_id_for_shim(id); });
  return with_comm<api::kLocal>(handle, [&](Communicator& comm) -> Status {
    MOECCL_TRY(api::require(id, "id", "the address of a moecclUniqueId"));
    MOECCL_TRY(env_status());
    MOECCL_ASSIGN_OR_RETURN(
        *id, bootstrap::make_unique_id(env().socket_addr.empty() ? comm.address() : "", comm.config().init_timeout_ms));
    return {};
  });
}

moecclResult_t moecclCommGrow(moecclComm_t handle, int n_ranks, const moecclUniqueId* id, int rank,
                              moecclComm_t* new_comm, const moecclConfig_t* config) {
  if (handle == nullptr) {
    return api::member_of_group(api::guarded(nullptr, [&] { return grow(n_ranks, id, rank, new_comm, config); }));
  }
  return api::collective(handle, [&](Communicator& comm) { return grow(comm, n_ranks, id, rank, new_comm, config); });
}

moecclResult_t moecclCommRevoke(moecclComm_t handle) {
  return api::with_pinned(handle, [](Communicator& comm) -> Status {
    if (Status s = comm.usable(); s.code() == moecclInvalidUsage) return s;  // in a forked child
    comm.revoke();
    return {};
  });
}
