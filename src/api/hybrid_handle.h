// SPDX-License-Identifier: Apache-2.0
// The handle of a hybrid placement, for all entry points that take one.
#pragma once

#include "src/api/convert.h"
#include "src/moe/hybrid.h"

namespace moeccl::api {

struct HybridHandle : OnComm<comm::Hybrid> {
  static constexpr Words kWords{"hybrid", "placement", "moecclHybridCreate", "the placement's"};
  comm::GroupHolds& group_holds() { return owned->group_holds(); }
};
using HybridTable = HandleTable<HybridHandle, moecclHybrid_t, 0xC6>;

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

// A call that makes an object of a placement, on its communicator unless another one is given.
template <class Table, class Config>
moecclResult_t create_from(typename Table::Handle* out, const char* type, moecclHybrid_t hybrid,
                           moecclComm_t comm_handle, const Config* config) {
  return collective<HybridTable>(hybrid, [&](comm::Hybrid& h, comm::Communicator&) -> Status {
    MOECCL_TRY(begin_create<Table>(out, type));
    if (comm_handle == nullptr) comm_handle = HybridTable::get().find(hybrid)->comm_handle;
    return make_on(comm_handle, [&](comm::Communicator& comm) {
      return give_handle<Table>(out, comm_handle, Table::Object::Owned::create(h, comm, config));
    });
  });
}

}  // namespace moeccl::api
