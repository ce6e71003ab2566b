// SPDX-License-Identifier: Apache-2.0
// What this MoECCL can do for a program written for NCCL.
#pragma once

namespace moeccl::shim {

// Returns whether the loaded MoECCL takes this process's CUDA memory; the first call tries it, where there is a device.
bool moeccl_serves_cuda();

}  // namespace moeccl::shim
