// The handle of a hybrid placement, for all who take one.
#pragma once

#include <memory>

#include "src/api/convert.h"
#include "src/comm/hybrid.h"

namespace moeccl::api {

struct HybridHandle {
  moecclComm_t comm_handle;
  std::unique_ptr<comm::Hybrid> hybrid;
};
using HybridTable = HandleTable<HybridHandle, moecclHybrid_t, 0xC6>;

// Calls body with a live placement whose communicator lives too.
template <class Body>
moecclResult_t with_hybrid(moecclHybrid_t handle, Body&& body) {
  HybridHandle* found = HybridTable::get().find(handle);
  if (found == nullptr)
    return finish(error(moecclInvalidArgument, "hybrid is {}: give one of moecclHybridCreate",
                        handle == nullptr ? "NULL" : "not a live placement"));
  return with_comm(
      found->comm_handle, [&](comm::Communicator& comm) { return body(*found->hybrid, comm); }, "the placement's");
}

}  // namespace moeccl::api
