// SPDX-License-Identifier: Apache-2.0
// What entry points share that make communicators.
#pragma once

#include <utility>

#include "src/api/convert.h"
#include "src/world/config.h"

namespace moeccl::api {

// Joins, measures the links if that is asked for, and gives out the handle. parent: of ranks that were there before.
Status join(const moecclUniqueId& id, int n_ranks, int rank, const comm::Config& config, moecclComm_t* out,
            const comm::Parent& parent = {});

// As with_comm(), for calls of any thread: the owner may destroy the communicator meanwhile.
template <class Body>
moecclResult_t with_pinned(moecclComm_t handle, Body&& body) {
  const auto comm = CommTable::get().pin(handle);
  if (comm.get() == nullptr) return with_comm(handle, [](comm::Communicator&) { return Status(); });  // says why
  return guarded(comm.get(), [&]() -> Status { return body(*comm.get()); });
}

}  // namespace moeccl::api
