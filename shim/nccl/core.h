// SPDX-License-Identifier: Apache-2.0
// The shim's versions of NCCL's functions: one for each line of functions.def, in core_*.cc.
#pragma once

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
