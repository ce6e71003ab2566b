// SPDX-License-Identifier: Apache-2.0
// Says in words why the persistent kernel gave up.
#pragma once

#include "kernels/cuda/walk_args.h"
#include "src/base/status.h"
#include "src/driver/cuda.h"
#include "src/exec/fabric.h"

namespace moeccl::exec {

// Returns the error that the device reports of an operation or a message of `fabric`'s rank in a context, or ok. The
// device may write to the report meanwhile.
Status failure_of(const moeccl::cuda::WalkReport& report, const Fabric& fabric, driver::cuda::Context context);

}  // namespace moeccl::exec
