// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda/modules.h"

#include <algorithm>
#include <array>
#include <mutex>

#include "src/driver/cuda/idle.h"
#include "src/driver/fork_page.h"

namespace moeccl::driver::cuda {

namespace {

// The modules of one context. The lock is held while they are loaded, because ranks that are threads arrive together
// and all need what the first one loads. Other contexts have their own lock and do not wait: a load may wait for a
// kernel of its device, and that kernel for a rank on another device.
struct Slot {
  std::mutex mutex;
  std::weak_ptr<const Modules> loaded;
};
struct Slots {
  std::mutex mutex;
  std::map<Context, Slot> of;  // never erased, because contexts are few
};

std::string release(int version) { return format("CUDA {}.{}", version / 1000, version % 1000 / 10); }
std::string release_and_branch(int version) {
  const char* branch = version == 12000 ? " (R525)" : version == 13000 ? " (R580)" : "";
  return release(version) + branch;
}

Status check_driver(const ModuleSet& set) {
  int version = 0;
  MOECCL_TRY(check(driver()->cuDriverGetVersion(&version), "the CUDA driver's version"));
  if (version >= set.least_driver) return {};
  return error(
      moecclUnsupported,
      "the CUDA driver is of {}, but the CUDA kernels of this library, made by {}, need a driver of {} or later: "
      "update the driver{}",
      release(version), set.made_by, release_and_branch(set.least_driver),
      set.least_driver > 12000 ? ", or build MoECCL with -Dnvcc or -Dptxas of CUDA 12" : "");
}

// Returns the output of the driver's linker or compiler as one line.
std::string in_one_line(const char* title, std::string log) {
  std::replace(log.begin(), log.end(), '\n', ' ');
  log.erase(log.find_last_not_of(' ') + 1);
  return log.empty() ? log : format("; {}: {}", title, log);
}

Status load_image(const ModuleImage& image, const ModuleSet& set, Module* module) {
  constexpr int kInfoLog = 3, kErrorLog = 5;  // each followed by the option for its size
  std::array<char, 1024> info{}, errors{};
  std::array<int, 4> options = {kInfoLog, kInfoLog + 1, kErrorLog, kErrorLog + 1};
  std::array<void*, 4> values = {info.data(), reinterpret_cast<void*>(info.size() - 1), errors.data(),
                                 reinterpret_cast<void*>(errors.size() - 1)};
  const int rc = driver()->cuModuleLoadDataEx(module, image.data, options.size(), options.data(), values.data());
  const Status status = check(rc, format("loading the CUDA kernels \"{}\" (made by {}, for drivers of {} or later)",
                                         image.name, set.made_by, release_and_branch(set.least_driver)));
  if (status.ok()) return {};
  return error(status.code(), "{}{}{}", status.message(), in_one_line("the driver's log", errors.data()),
               in_one_line("its remarks", info.data()));
}

// Loads the function into the device. Without this call, the driver may postpone that.
Status load_now(Function function, const std::string& name) {
  static const auto load = reinterpret_cast<int (*)(Function)>(driver_symbol("cuFuncLoad"));  // CUDA 12.4
  if (load != nullptr) return check(load(function), format("loading the CUDA kernel {}", name));
  constexpr int kRegisters = 4;  // an older driver has to load the function to answer this
  int registers = 0;
  return check(driver()->cuFuncGetAttribute(&registers, kRegisters, function),
               format("loading the CUDA kernel {}", name));
}

}  // namespace

bool loads_lazily() {
  static const auto ask = reinterpret_cast<int (*)(int*)>(driver_symbol("cuModuleGetLoadingMode"));  // CUDA 11.7
  constexpr int kLazy = 2;
  int mode = 0;
  return ask != nullptr && ask(&mode) == 0 && mode == kLazy;
}

Result<std::shared_ptr<const Modules>> Modules::of(Context context, const ModuleSet& set) {
  static constinit PerProcess<Slots> all;
  Slots& slots = all.get();
  std::unique_lock whole(slots.mutex);
  Slot& slot = slots.of[context];
  whole.unlock();
  const std::lock_guard lock(slot.mutex);
  if (auto there = slot.loaded.lock()) return there;
  const Current current(context);
  MOECCL_TRY(check_driver(set));
  const std::shared_ptr<Modules> modules(new Modules);
  modules->context_ = context;
  MOECCL_TRY(modules->load(set));
  slot.loaded = modules;
  return std::shared_ptr<const Modules>(modules);
}

Modules::~Modules() {
  when_idle(context_, [modules = std::move(modules_)] {
    for (const Module m : modules) (void)driver()->cuModuleUnload(m);
  });
}

Status Modules::load(const ModuleSet& set) {
  for (const ModuleImage& image : set.images) {
    Module module = nullptr;
    MOECCL_TRY(load_image(image, set, &module));
    modules_.push_back(module);
  }
  for (const std::string& name : set.functions) MOECCL_TRY(load_function(name, set.block_threads));
  return {};
}

Status Modules::load_function(const std::string& name, int block_threads) {
  Kernel kernel;
  const bool found = std::any_of(modules_.begin(), modules_.end(), [&](Module m) {
    return driver()->cuModuleGetFunction(&kernel.function, m, name.c_str()) == 0;
  });
  if (!found) return error(moecclInternalError, "the CUDA kernel {} is in no image of this library", name);
  MOECCL_TRY(load_now(kernel.function, name));
  int blocks = 0;
  MOECCL_TRY(
      check(driver()->cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function, block_threads, 0), name));
  kernel.blocks_on_sm = static_cast<uint32_t>(std::max(1, blocks));
  kernels_.emplace(name, kernel);
  return {};
}

}  // namespace moeccl::driver::cuda
