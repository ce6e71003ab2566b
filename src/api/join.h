// SPDX-License-Identifier: Apache-2.0
// Shared by the entry points that create communicators.
#pragma once

#include <utility>

#include "src/api/convert.h"
#include "src/world/config.h"

namespace moeccl::api {

// Joins, measures the links if requested, and returns the handle. `parent` describes an existing communicator, if any.
Status join(const moecclUniqueId& id, int n_ranks, int rank, const comm::Config& config, moecclComm_t* out,
            const comm::Parent& parent = {});

// Like with_comm(), but for calls from any thread, during which the owner may destroy the communicator.
template <Scope kScope = kWithPeers, class Body>
moecclResult_t with_pinned(moecclComm_t handle, Body&& body) {
  const auto comm = CommTable::get().pin(handle);
  if (comm.get() == nullptr) return with_comm(handle, [](comm::Communicator&) { return Status(); });  // reports why
  return guarded<kScope>(comm.get(), [&]() -> Status { return body(*comm.get()); });
}

}  // namespace moeccl::api
