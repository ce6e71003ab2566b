// What this MoECCL can do for a program written for NCCL.
#pragma once

namespace moeccl::shim {

// Whether the loaded MoECCL takes CUDA memory and CUDA streams.
bool moeccl_serves_cuda();

}  // namespace moeccl::shim
