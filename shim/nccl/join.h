// SPDX-License-Identifier: Apache-2.0
// How communicators come to be: joining, deciding together which library serves, and meeting again after a loss.
#pragma once

#include <vector>

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

bool is_moeccl_id(const ncclUniqueId& id);

// Joins n_ranks under a MoECCL id, agrees with all of them which library serves, and fills comm.
ncclResult_t join(Comm& comm, int n_ranks, const ncclUniqueId& id, int rank, InitConfig config);
// The rest of what a new MoECCL communicator of known `ours` needs. Collective over it.
ncclResult_t adopt(Comm& comm);
// A new communicator of the given ranks of `parent` (ascending, this one among them); no other rank takes part. The
// parent may be aborted or revoked, if all ranks know it (`parent_works` false). Fills `comm`.
ncclResult_t meet_again(Comm& parent, const std::vector<int>& ranks, bool parent_works, Comm& comm);

}  // namespace moeccl::shim
