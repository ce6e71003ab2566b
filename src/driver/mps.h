// SPDX-License-Identifier: Apache-2.0
// CUDA's Multi-Process Service, as far as its files show it. With it, processes that share a GPU run their kernels side
// by side; without it, they take turns. A rank relies on what its driver says about its device (cuda::kMpsEnabled).
// This is only for a report and queries no driver.
#pragma once

#include <string>

namespace moeccl::driver {

struct Mps {
  std::string directory;  // of the control daemon's pipes: CUDA_MPS_PIPE_DIRECTORY or else /tmp/nvidia-mps
  bool named = false;     // the variable is set
  bool pipe = false;      // the pipe `control` exists
  bool gone = false;      // no process has the pid that the daemon left: it ended, or is outside this container
  bool runs() const { return pipe && !gone; }
};

// `root` is put in front of the directory and /proc in tests.
Mps find_mps(const std::string& root = "");

}  // namespace moeccl::driver
