// SPDX-License-Identifier: Apache-2.0
#include "src/driver/mps.h"

#include <sys/stat.h>

#include "src/base/format.h"
#include "src/base/trusted_library.h"
#include "src/driver/sysfs.h"

namespace moeccl::driver {

Mps find_mps(const std::string& root) {
  Mps mps;
  const char* set = trusted_variable("CUDA_MPS_PIPE_DIRECTORY");
  mps.named = set != nullptr && *set != '\0';
  mps.directory = mps.named ? set : "/tmp/nvidia-mps";
  struct stat control = {};
  mps.pipe = stat(format("{}{}/control", root, mps.directory).c_str(), &control) == 0 && S_ISFIFO(control.st_mode);
  // The pipes remain when the daemon is killed.
  const Sysfs files(root.empty() ? "/" : root);
  const int64_t pid = files.number(format("{}/nvidia-cuda-mps-control.pid", mps.directory), 0);
  mps.gone = mps.pipe && pid > 0 && !files.exists(format("proc/{}", pid));
  return mps;
}

}  // namespace moeccl::driver
