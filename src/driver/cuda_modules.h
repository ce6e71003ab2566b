// SPDX-License-Identifier: Apache-2.0
// Kernels in a context: loaded once for all ranks and communicators of the process that use it, and unloaded with the
// last of them.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/driver/cuda.h"

namespace moeccl::driver::cuda {

struct ModuleImage {
  const char* name;
  const void* data;
};
struct ModuleSet {
  std::vector<ModuleImage> images;
  int least_driver = 0;  // that loads them, as cuDriverGetVersion counts
  const char* made_by = "";
  std::vector<std::string> functions;
  int block_threads = 256;  // of every launch
};
struct Kernel {
  Function function = nullptr;
  uint32_t blocks_on_sm = 1;  // that fit on a multiprocessor at once
};

class Modules {
 public:
  // The context's, loaded if nobody has them. All functions are loaded before this returns, whatever
  // CUDA_MODULE_LOADING says: the driver may wait for the device when it loads one, and so for a kernel that waits for
  // the launch. Every call for a context gives the same set. Any thread.
  // Shared, because communicators of one context end in any order. They are not kept for the process: a program may
  // reset its device when the last communicator is gone, which ends the context and all modules in it.
  static Result<std::shared_ptr<const Modules>> of(Context context, const ModuleSet& set);
  ~Modules();
  Modules(const Modules&) = delete;
  Modules& operator=(const Modules&) = delete;

  // One whose name is in the set.
  const Kernel& kernel(const std::string& name) const { return kernels_.at(name); }

 private:
  Modules() = default;
  Status load(const ModuleSet& set);
  Status load_function(const std::string& name, int block_threads);

  Context context_ = nullptr;
  std::vector<Module> modules_;
  std::map<std::string, Kernel> kernels_;
};

}  // namespace moeccl::driver::cuda
