// SPDX-License-Identifier: Apache-2.0
// The four ways of an operation (src/exec/runner.h). What a runner is given outlives it.
#pragma once

#include "src/exec/runner.h"

namespace moeccl::exec {

class StreamEngine;

// On host memory, step by step. A thread that works for a caller's CUDA stream first waits for what that stream had.
std::unique_ptr<Runner> host_runner(Fabric& fabric);
// The same for small operations, as exec::Eager.
std::unique_ptr<Runner> eager_runner(Fabric& fabric);
// On CUDA memory, step by step, with the engine's kernels.
std::unique_ptr<Runner> stream_runner(Fabric& fabric, StreamEngine& engine);
// On CUDA memory, as one kernel.
std::unique_ptr<Runner> kernel_runner(Fabric& fabric, PersistentKernel& kernel);

}  // namespace moeccl::exec
