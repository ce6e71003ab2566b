// SPDX-License-Identifier: Apache-2.0
// The kernels of a context. They are loaded once for all ranks and communicators of the process that use the context,
// and unloaded with the last of them.
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
  int least_driver = 0;  // oldest driver that loads them, in the numbering of cuDriverGetVersion
  const char* made_by = "";
  std::vector<std::string> functions;
  int block_threads = 256;  // block size of every launch
};
struct Kernel {
  Function function = nullptr;
  uint32_t blocks_on_sm = 1;  // number of blocks that fit on a multiprocessor at once
};

// Returns whether the program loads its kernels when it first launches them (CUDA_MODULE_LOADING; the default since
// CUDA 12.2).
bool loads_lazily();

class Modules {
 public:
  // Returns the context's modules and loads them if they are not loaded yet. All functions are loaded before this
  // returns, whatever CUDA_MODULE_LOADING says: the driver may wait for the device when it loads a function, and thus
  // for a kernel that itself waits for the launch. Every call for a context must give the same set. May be called from
  // any thread. The result is shared because the communicators of a context end in any order. It is not kept for the
  // life of the process, because a program may reset its device after the last communicator is gone, which ends the
  // context and all modules in it.
  static Result<std::shared_ptr<const Modules>> of(Context context, const ModuleSet& set);
  ~Modules();
  Modules(const Modules&) = delete;
  Modules& operator=(const Modules&) = delete;

  // `name` must be in the set.
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
