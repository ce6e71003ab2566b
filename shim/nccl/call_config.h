// SPDX-License-Identifier: Apache-2.0
// What a program asks of a single call: ncclCollConfig_t, which the nccl<Collective>Config functions of NCCL 2.31 and
// later take.
#pragma once

#include <string>
#include <vector>

#include "shim/nccl/abi.h"

namespace moeccl::shim {

struct Call;
struct Comm;

// A copy, because the calls of a group are issued after the program's own config may be gone.
class CallConfig {
 public:
  CallConfig() = default;
  CallConfig(const CallConfig&) = delete;  // `given_` points into it
  CallConfig& operator=(const CallConfig&) = delete;

  // InvalidArgument when `config` was not made by NCCL_COLLCONFIG_INITIALIZER.
  static ncclResult_t from(const char* function, const ncclCollConfig_t& config, CallConfig* out);

  // For the real library: the fields that the program's version of the struct has. Option values are the program's own.
  const ncclCollConfig_t* given() const { return &given_; }
  // The algorithm that MoECCL is asked for, by MoECCL's or NCCL's names ("ring", "RING_LL,TREE_LL"); empty: none.
  const std::string& algorithms() const { return algorithms_; }
  bool must() const { return given_.forceAlgSelection != 0; }
  cudaEvent_t event() const { return given_.launchCompletionEvent; }

 private:
  ncclCollConfig_t given_{};
  std::vector<ncclConfigExt_t> options_;
  std::string selection_, algorithms_;
};

// Makes MoECCL's next plan for the call's operation follow the call's config, or the communicator's own choice without
// one. Returns InvalidUsage when the config insists on an algorithm that cannot run.
ncclResult_t choose_algorithm(const Call& call, Comm& comm);
// Records the event that the call's config may name.
ncclResult_t record_event(const Call& call);

// Returns what the call wants of the plan: calls of one operation in one group must agree on it.
const std::string& wanted_algorithms(const Call& call);

}  // namespace moeccl::shim
