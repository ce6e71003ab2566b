// SPDX-License-Identifier: Apache-2.0
// The emulated driver's modules, functions and launches. Whatever image is loaded, its kernels are those that are
// compiled in.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <utility>

#include "kernels/cuda/walk_args.h"
#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/support/cuda_emulation/stream.h"

namespace {

using namespace moeccl::emulation::driver;
using moeccl::emulation::Kernel;

struct Module;
struct Function {
  Module* module = nullptr;
  const Kernel* kernel = nullptr;
  std::atomic<bool> loaded{false};
};
struct Module {
  Context* context = nullptr;
  std::mutex mutex;
  std::map<std::string, void*> functions;  // handles, by name
};
Handles<Module>& modules() {
  static auto* const all = new Handles<Module>;
  return *all;
}
Handles<Function>& functions() {
  static auto* const all = new Handles<Function>;
  return *all;
}
std::atomic<int> launches{0};

bool lazy() {
  const char* mode = std::getenv("CUDA_MODULE_LOADING");
  return mode == nullptr || std::strcmp(mode, "EAGER") != 0;  // lazy since CUDA 12.2
}

// Brings a function to the device, for which all streams of the context have to end. No other call returns meanwhile.
void load(Function& f) {
  if (f.loaded) return;
  if (rule("LAZY_LOADING")) synchronizes_alone(*f.module->context);
  f.loaded = true;
}

constexpr unsigned kMostThreads = 256;  // of a block: MOECCL_KERNEL in kernels/cuda/device.cuh

bool waits_for_blocks(const Kernel& kernel) {
  return std::strncmp(kernel.name, "moeccl_walk", 11) == 0 || std::strncmp(kernel.name, "moeccl_ladder", 13) == 0 ||
         std::strstr(kernel.name, "moeccl_messages") != nullptr || std::strstr(kernel.name, "_together") != nullptr;
}
// Returns the registers of a thread. Kernels that wait for each other promise two blocks of 256 threads on a
// multiprocessor, others four. The kernel of the tests fills a multiprocessor with a warp.
uint32_t registers_of(const Kernel& kernel) {
  if (std::strncmp(kernel.name, "emulated_", 9) == 0 && waits_for_blocks(kernel)) return Room::kRegisters / 32;
  return waits_for_blocks(kernel) ? 128 : 64;
}
uint32_t blocks_on_sm(const Kernel& kernel, uint32_t threads) {
  return std::min(Room::kThreads / threads, Room::kRegisters / (registers_of(kernel) * threads));
}

}  // namespace

// For tests: returns how many kernels of this process have started, including those of graphs.
EXPORT int moeccl_emulated_launches() { return launches.load(); }

// For tests: returns the number of stores by which this process's kernels released their writes to the whole system.
EXPORT int moeccl_emulated_releases() { return moeccl::emulation::releases.load(); }

// For tests: bytes of programs that one block of each of this process's persistent kernels found in page-locked memory,
// across the bus.
namespace {
std::atomic<size_t> program_bytes{0};
void note_program(const char* kernel, const void* args) {
  if (std::strncmp(kernel, "moeccl_walk", 11) != 0) return;
  const auto& a = *static_cast<const moeccl::cuda::WalkArgs*>(args);
  const std::lock_guard lock(machine().mutex);
  if (!is_pinned(reinterpret_cast<uint64_t>(a.lanes))) return;
  program_bytes += a.n_lanes * sizeof(*a.lanes) + a.n_steps * sizeof(*a.steps) + a.n_refs * sizeof(*a.refs) +
                   a.n_totals * sizeof(*a.totals);
}
}  // namespace
EXPORT int moeccl_emulated_program_bytes() { return static_cast<int>(program_bytes.load()); }

// Understands only the options that say where the linker writes its log.
EXPORT int cuModuleLoadDataEx(void** module, const void*, unsigned n, int* options, void** values) {
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  constexpr int kErrorLog = 5, kErrorLogBytes = 6;
  if (const char* refused = std::getenv("MOECCL_TEST_CUDA_IMAGE_ERROR"); refused != nullptr) {
    char* log = nullptr;
    size_t* bytes = nullptr;
    size_t room = 0;
    for (unsigned i = 0; i < n; ++i) {
      if (options[i] == kErrorLog) log = static_cast<char*>(values[i]);
      if (options[i] != kErrorLogBytes) continue;
      // The value is the size of the buffer, and receives the number of bytes written.
      room = reinterpret_cast<size_t>(values[i]);
      bytes = reinterpret_cast<size_t*>(&values[i]);
    }
    if (log != nullptr && room > 0) {
      std::snprintf(log, room, "emulated linker: image refused with error %s", refused);
      if (bytes != nullptr) *bytes = std::strlen(log) + 1;
    }
    return std::atoi(refused);
  }
  synchronizes_alone(*context);  // as seen on an H200
  auto m = std::make_shared<Module>();
  m->context = context;
  *module = modules().add(std::move(m));
  return kOk;
}
EXPORT int cuModuleLoadData(void** module, const void* image) {
  MOECCL_CALL();
  return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}
EXPORT int cuModuleUnload(void* module) {
  MOECCL_IN_CONTEXT(context);
  MOECCL_UNSAFE();
  const std::shared_ptr<Module> m = modules().remove(module);
  if (m == nullptr) return kInvalidHandle;
  synchronizes_alone(*m->context);
  const std::lock_guard lock(m->mutex);
  for (const auto& [name, handle] : m->functions) (void)functions().remove(handle);
  return kOk;
}
EXPORT int cuModuleGetLoadingMode(int* mode) {
  MOECCL_CALL();
  return *mode = lazy() ? 2 : 1, kOk;
}
EXPORT int cuModuleGetFunction(void** function, void* module, const char* name) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Module> m = modules().find(module);
  if (m == nullptr) return kInvalidHandle;
  const Kernel* kernel = moeccl::emulation::find_kernel(name);
  if (kernel == nullptr) return kNotFound;
  const std::lock_guard lock(m->mutex);
  void*& handle = m->functions[name];
  if (handle == nullptr) {
    auto f = std::make_shared<Function>();
    f->module = m.get();
    f->kernel = kernel;
    f->loaded = !lazy();
    handle = functions().add(std::move(f));
  }
  return *function = handle, kOk;
}
// Every module has all kernels.
EXPORT int cuModuleGetFunctionCount(unsigned* n, void* module) {
  MOECCL_IN_CONTEXT(context);
  if (modules().find(module) == nullptr) return kInvalidHandle;
  return *n = static_cast<unsigned>(moeccl::emulation::n_kernels()), kOk;
}
EXPORT int cuModuleEnumerateFunctions(void** out, unsigned n, void* module) {
  for (unsigned i = 0; i < n && i < moeccl::emulation::n_kernels(); ++i)
    if (const int rc = cuModuleGetFunction(&out[i], module, moeccl::emulation::kernel_at(i).name); rc != kOk) return rc;
  return kOk;
}
EXPORT int cuFuncGetName(const char** name, void* function) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  if (f == nullptr) return kInvalidHandle;
  return *name = f->kernel->name, kOk;
}
EXPORT int cuFuncGetModule(void** module, void* function) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  if (f == nullptr) return kInvalidHandle;
  return *module = f->module, kOk;
}
EXPORT int cuFuncIsLoaded(int* state, void* function) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  if (f == nullptr) return kInvalidHandle;
  return *state = f->loaded, kOk;
}
EXPORT int cuFuncLoad(void* function) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  if (f == nullptr) return kInvalidHandle;
  return load(*f), kOk;
}
EXPORT int cuFuncGetAttribute(int* value, int attribute, void* function) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  if (f == nullptr) return kInvalidHandle;
  load(*f);
  constexpr int kThreads = 0, kRegisters = 4, kPtx = 5, kBinary = 6;
  switch (attribute) {
    case kThreads:
      return *value = kMostThreads, kOk;
    case kRegisters:
      return *value = static_cast<int>(registers_of(*f->kernel)), kOk;
    case kPtx:
    case kBinary:
      return *value = 90, kOk;
    default:
      return *value = 0, attribute >= 0 && attribute < 16 ? kOk : kInvalidValue;
  }
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  if (f == nullptr) return kInvalidHandle;
  if (threads <= 0 || threads > 1024) return kInvalidValue;
  load(*f);
  return *blocks = static_cast<int>(blocks_on_sm(*f->kernel, static_cast<uint32_t>(threads))), kOk;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void* function, int threads, size_t shared,
                                                                unsigned) {
  MOECCL_CALL();
  return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

namespace {
// A stream takes some thousand launches, and a further call returns when one of them has begun.
void wait_for_room(Stream& stream) {
  static const size_t most = [] {
    const char* set = std::getenv("MOECCL_TEST_CUDA_QUEUE");
    return set == nullptr ? ~size_t{0} : static_cast<size_t>(std::atoi(set));
  }();
  if (most == ~size_t{0}) return;
  while (stream.n_queued() >= most && stream.context->failed == 0)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}
}  // namespace
EXPORT int cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned, void* stream, void** parameters, void**) {
  MOECCL_IN_CONTEXT(context);
  const std::shared_ptr<Function> f = functions().find(function);
  const std::shared_ptr<Stream> s = stream_of(stream);
  if (f == nullptr || s == nullptr || f->module->context != s->context) return kInvalidHandle;
  if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x == 0 || block_x > kMostThreads || block_y != 1 ||
      block_z != 1)
    return kInvalidValue;
  if (!is_captured(*s)) wait_for_room(*s);
  const Kernel* const kernel = f->kernel;
  std::vector<char> args(static_cast<const char*>(parameters[0]),
                         static_cast<const char*>(parameters[0]) + kernel->bytes);
  load(*f);
  Item item;
  // Kernels whose blocks wait for each other start together; others start as soon as one of their blocks can.
  const bool together = waits_for_blocks(*kernel);
  if (s->context->shares_channels)
    item.room = std::min(Room::kAll, registers_of(*kernel) * block_x * (together ? grid_x : 1));
  item.run = [=, own = s->context] {
    ++launches;
    if (const size_t at = find_pageable(args.data(), args.size()); at < args.size()) {
      std::fprintf(stderr, "emulated device %d: the address at byte %zu of the arguments of %s is not page-locked\n",
                   own->device, at, kernel->name);
      own->failed = kIllegalAddress;
      return;
    }
    const Access access(own, true);
    alignas(64) char copy[8192];
    if (args.size() > sizeof(copy)) std::abort();
    std::memcpy(copy, args.data(), args.size());
    moeccl::emulation::Launch how;
    how.blocks = grid_x;
    how.threads = block_x;
    how.seed = args.size() + grid_x;
    how.concurrent = together;
    how.threads_apart = false;
    how.failed = &own->failed;
    how.on_thread = [own] { return std::make_shared<Access>(own, true); };
    note_program(kernel->name, copy);
    moeccl::emulation::launch(*kernel, copy, how);
  };
  return put(s, std::move(item));
}
