// SPDX-License-Identifier: Apache-2.0
// The four ways to run an operation (src/exec/runner.h). The objects that a runner is given must outlive it.
#pragma once

#include "src/exec/runner.h"

namespace moeccl::exec {

class StreamEngine;

// Runs on host memory, step by step. A thread that works for a caller's CUDA stream first waits for that stream's
// earlier work.
std::unique_ptr<Runner> host_runner(Fabric& fabric);
// Does the same for small operations, with exec::Eager.
std::unique_ptr<Runner> eager_runner(Fabric& fabric);
// Runs on CUDA memory, step by step, with the engine's kernels.
std::unique_ptr<Runner> stream_runner(Fabric& fabric, StreamEngine& engine);
// Runs on CUDA memory, as one kernel.
std::unique_ptr<Runner> kernel_runner(Fabric& fabric, PersistentKernel& kernel);

}  // namespace moeccl::exec
