// SPDX-License-Identifier: Apache-2.0
#include "shim/mpi/gpu.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "shim/mpi/comm.h"

namespace moeccl::shim {
namespace {

bool is_loaded(const char* library) {
  void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  if (loaded != nullptr) dlclose(loaded);
  return loaded != nullptr;
}

bool sees_cuda() {
  std::string_view driver = variable("MOECCL_CUDA_DRIVER");
  if (driver.empty() || driver == "none") driver = "libcuda.so.1";  // with "none", only MoECCL does without CUDA
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  // CUDA ignores the list from its first invalid entry on.
  if (visible != nullptr && (*visible == '\0' || *visible == '-')) return false;
  if (is_loaded(driver.data())) return true;
  // The program may load the driver after the communicator has been taken over.
  constexpr const char* kDevices[] = {"/dev/nvidiactl", "/dev/dxg" /* WSL */, "/dev/nvmap" /* Tegra */};
  return std::any_of(std::begin(kDevices), std::end(kDevices), [](const char* d) { return access(d, F_OK) == 0; });
}

// The drivers of ROCm, below HIP, and of Level Zero. Their devices are no sign: most laptops have one.
bool has_loaded_another() { return is_loaded("libhsa-runtime64.so.1") || is_loaded("libze_loader.so.1"); }

}  // namespace

bool may_use_gpu() {
  static const bool may = sees_cuda() || has_loaded_another();
  return may;
}

}  // namespace moeccl::shim
