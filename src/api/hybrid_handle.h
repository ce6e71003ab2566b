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

}  // namespace moeccl::api
