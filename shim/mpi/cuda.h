// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace moeccl::shim {

// Returns whether this process may pass memory of a CUDA device to MPI: CUDA's driver is loaded, or this machine has a
// device. Initialises nothing, so that a process without CUDA stays so and may still fork. The first answer is kept:
// MoECCL itself may load the driver later.
bool may_use_cuda();

}  // namespace moeccl::shim
