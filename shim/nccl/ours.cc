#include "shim/nccl/ours.h"

namespace moeccl::shim {

// MoECCL's public interface has no CUDA memory yet: its buffers are the host's.
bool moeccl_serves_cuda() { return false; }

}  // namespace moeccl::shim
