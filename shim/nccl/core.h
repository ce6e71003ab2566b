// SPDX-License-Identifier: Apache-2.0
// The shim's versions of NCCL's functions: one for each line of functions.def, in core_*.cc.
#pragma once

#include "shim/nccl/group.h"
#include "shim/nccl/real.h"
#include "shim/nccl/table.h"

namespace moeccl::shim::core {

#define DECLARE(result, name, parameters, arguments, failure) result name parameters;
#define NCCL_FUNCTION DECLARE
#define NCCL_DEVICE_FUNCTION DECLARE
#include "shim/nccl/functions.def"
#undef NCCL_DEVICE_FUNCTION
#undef NCCL_FUNCTION
#undef DECLARE

}  // namespace moeccl::shim::core

// How a function of a communicator begins. Declares `target` and goes on if the communicator is MoECCL's (target.ours).
// Returns if it cannot be used, and calls NCCL's function with these arguments if it is NCCL's (target.real).
#define MOECCL_OURS_OR_FORWARD(target, comm, need, name, ...) \
  MOECCL_OURS_OR_(target, comm, need, name, );                \
  if (target.real != nullptr) return MOECCL_FORWARD(name, __VA_ARGS__)
// The same for what NCCL takes into an open group,
#define MOECCL_OURS_OR_FORWARD_IN_GROUP(target, comm, need, name, ...) \
  MOECCL_OURS_OR_(target, comm, need, name, );                         \
  if (target.real != nullptr) return forward_in_group([&] { return MOECCL_FORWARD(name, __VA_ARGS__); })
// and where a failure is the group's, too.
#define MOECCL_OURS_OR_FAIL_GROUP(target, comm, need, name, ...) \
  MOECCL_OURS_OR_(target, comm, need, name, fail_group);         \
  if (target.real != nullptr) return forward_in_group([&] { return MOECCL_FORWARD(name, __VA_ARGS__); })
#define MOECCL_OURS_OR_(target, comm, need, name, failed)                                              \
  Target target;                                                                                       \
  if (const ncclResult_t result_ = resolve("nccl" #name, comm, &target, need); result_ != ncclSuccess) \
  return failed(result_)
