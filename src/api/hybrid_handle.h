// SPDX-License-Identifier: Apache-2.0
// The handle of a hybrid placement, for all entry points that take one.
#pragma once

#include <memory>

#include "src/api/convert.h"
#include "src/moe/hybrid.h"

namespace moeccl::api {

struct HybridHandle {
  moecclComm_t comm_handle;
  std::unique_ptr<comm::Hybrid> hybrid;
};
using HybridTable = HandleTable<HybridHandle, moecclHybrid_t, 0xC6>;

// Calls `body` with a live placement whose communicator is live too.
template <class Body>
moecclResult_t with_hybrid(moecclHybrid_t handle, Body&& body) {
  const Result<HybridHandle*> found = live(HybridTable::get(), handle, "hybrid", "placement", "moecclHybridCreate");
  if (!found.ok()) return finish(found.status());
  comm::Hybrid& hybrid = *found.value()->hybrid;
  return with_comm(
      found.value()->comm_handle, [&](comm::Communicator& comm) { return body(hybrid, comm); }, "the placement's");
}

// Calls `make` (Status of a Communicator&) for an object that is made of a placement and may be on another communicator
// than the placement's: a failure ends that one, and is its last error.
template <class Make>
Status make_on(moecclComm_t comm_handle, Make&& make) {
  comm::Communicator* comm = nullptr;
  MOECCL_TRY(find_comm(comm_handle, &comm));
  Status status = comm->shielded([&] { return make(*comm); });
  if (!status.ok()) comm->set_last_error(status.message());
  return status;
}

}  // namespace moeccl::api
