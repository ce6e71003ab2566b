// SPDX-License-Identifier: Apache-2.0
// How communicators come to be: joining, and deciding together which library serves.
#pragma once

#include "shim/nccl/comm.h"

namespace moeccl::shim {

// What the program asked for; the pointers of its config are copied.
struct InitConfig {
  ncclConfig_t given{};  // all that the program's version of the struct holds; the rest undefined
  std::string name, net_name;
  bool set = false;

  // InvalidArgument when `config` was not made by NCCL_CONFIG_INITIALIZER. NULL is allowed.
  static ncclResult_t from(const char* function, const ncclConfig_t* config, InitConfig* out);
  ncclConfig_t* pointer() { return set ? &given : nullptr; }  // for the real library
  bool blocking() const { return given.blocking != 0; }
};

// Whether this process's memory wants NCCL rather than MoECCL, and if so, why.
bool wants_nccl(std::string* reason);

// MOECCL_ENCRYPT=1, which does not reach NCCL: InvalidUsage that says so before anything is handed to it.
bool encryption_is_asked();
ncclResult_t refuse_unencrypted(const std::string& reason);

bool is_moeccl_id(const ncclUniqueId& id);

// Joins n_ranks under a MoECCL id, agrees with all of them which library serves, and fills comm.
ncclResult_t join(Comm& comm, int n_ranks, const ncclUniqueId& id, int rank, InitConfig config);
// The same once `ours` has come about.
ncclResult_t settle(Comm& comm, InitConfig config);
// The rest of what a new MoECCL communicator of known `ours` needs that comes from one. Collective over it.
ncclResult_t adopt(Comm& comm);

}  // namespace moeccl::shim
