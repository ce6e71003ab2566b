// SPDX-License-Identifier: Apache-2.0
// What this MoECCL can do for a program written for NCCL.
#pragma once

#include <string>

namespace moeccl::shim {

// Returns whether the loaded MoECCL takes this process's CUDA memory; the first call tries it, where there is a device.
bool moeccl_serves_cuda();
// Returns the reason if it does not, or nothing if it does.
const std::string& why_not_cuda();

}  // namespace moeccl::shim
