// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace moeccl::shim {

// Returns whether this process may pass memory of a GPU to MPI: a GPU's driver is loaded, or this machine has a CUDA
// device. Initialises nothing, so that a process without a GPU stays so and may still fork. The first answer is kept:
// MoECCL itself may load the driver later.
bool may_use_gpu();

}  // namespace moeccl::shim
