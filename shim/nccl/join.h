// SPDX-License-Identifier: Apache-2.0
// How communicators are made: ranks join, and decide together which library serves.
#pragma once

#include "shim/nccl/comm.h"

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
};

// Returns whether this process's memory needs NCCL rather than MoECCL, and if so, why.
bool wants_nccl(std::string* reason);

// MOECCL_ENCRYPT=1 does not reach NCCL: refuse_unencrypted() says so with InvalidUsage before NCCL is handed anything.
bool encryption_is_asked();
ncclResult_t refuse_unencrypted(const std::string& reason);

bool is_moeccl_id(const ncclUniqueId& id);

// Joins n_ranks under a MoECCL id, agrees with all of them which library serves, and fills comm.
ncclResult_t join(Comm& comm, int n_ranks, const ncclUniqueId& id, int rank, InitConfig config);
// Does what is left of join() once `ours` exists.
ncclResult_t settle(Comm& comm, InitConfig config);
// Completes a MoECCL communicator that was made from another one, once its `ours` exists. Collective over it.
ncclResult_t adopt(Comm& comm);

}  // namespace moeccl::shim
