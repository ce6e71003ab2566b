// SPDX-License-Identifier: Apache-2.0
// CUDA's Multi-Process Service as its files show it: processes that share a GPU run their kernels side by side under
// it, and take turns without. What counts for a rank is what its driver says of its device (cuda::kMpsEnabled); this is
// for a report, and asks no driver.
#pragma once

#include <string>

namespace moeccl::driver {

struct Mps {
  std::string directory;  // of the control daemon's pipes: CUDA_MPS_PIPE_DIRECTORY, else /tmp/nvidia-mps
  bool named = false;     // the variable is set
  bool pipe = false;      // `control` is there
  bool gone = false;      // no process has the number that the daemon left there: ended, or outside of this container
  bool runs() const { return pipe && !gone; }
};

// `root` stands before the directory and /proc in tests.
Mps find_mps(const std::string& root = "");

}  // namespace moeccl::driver
