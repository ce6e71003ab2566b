// SPDX-License-Identifier: Apache-2.0
// How communicators are made: ranks join, and decide together which library serves.
#pragma once

#include "shim/nccl/comm.h"
#include "src/base/shim_requests.h"

namespace moeccl::shim {

// What the program asked for. What its config's pointers point to is copied.
struct InitConfig {
  ncclConfig_t given{};  // the fields that the program's version of the struct has; the rest undefined
  std::string name, net_name;
  bool set = false;

  // Returns InvalidArgument when `config` was not made by NCCL_CONFIG_INITIALIZER. NULL is allowed.
  static ncclResult_t from(const char* function, const ncclConfig_t* config, InitConfig* out);
  ncclConfig_t* pointer() { return set ? &given : nullptr; }  // for the real library
  bool blocking() const { return given.blocking != 0; }
  // 0 (no graphs) and 1 (one graph, and nothing beside it) need no order between graphs and other operations.
  bool graph_mixing() const { return given.graphUsageMode != 0 && given.graphUsageMode != 1; }
};

// Returns whether this process's memory needs NCCL rather than MoECCL, and if so, why.
bool wants_nccl(std::string* reason);

// MOECCL_ENCRYPT=1 does not reach NCCL: refuse_unencrypted() says so with InvalidUsage before NCCL is handed anything.
bool encryption_is_asked();
ncclResult_t refuse_unencrypted(const std::string& reason);

// Makes the id of a communicator that MoECCL may serve: at the place that NCCL_COMM_ID names, if `by_place`.
ncclResult_t make_id(ncclUniqueId* id, bool by_place);
bool is_moeccl_id(const ncclUniqueId& id);

// Returns how MoECCL is to make this communicator, in a call that ends before the communicator does.
ShimConfig config_of(const Comm& comm);
// Joins n_ranks under a MoECCL id, agrees with all of them which library serves, and fills comm.
ncclResult_t join(Comm& comm, int n_ranks, const ncclUniqueId& id, int rank, InitConfig config);
// Does what is left of join() once `ours` exists.
ncclResult_t settle(Comm& comm, InitConfig config);
// Completes a MoECCL communicator that was made from another one, once its `ours` exists. Collective over it.
ncclResult_t adopt(Comm& comm);

}  // namespace moeccl::shim
