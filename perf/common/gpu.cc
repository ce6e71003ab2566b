// SPDX-License-Identifier: Apache-2.0
#include "perf/common/gpu.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <string>

#include "perf/common/fail.h"
#include "src/base/trusted_library.h"

namespace perf::gpu {
namespace {

void* driver() {
  static void* const library = [] {
    const char* named = moeccl::trusted_variable("MOECCL_CUDA_DRIVER");
    std::string name = named != nullptr ? named : "";
    // Ranks may share a device (docs/cuda.md, "Several ranks on one device").
    (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    if (name.empty())
      name = "libcuda.so.1";
    else if (const std::string why = moeccl::why_not_loaded(&name); name != "none" && !why.empty())
      fail("MOECCL_CUDA_DRIVER is not loaded: " + why);
    void* opened = dlopen(name.c_str(), RTLD_NOW);
    if (opened == nullptr) fail("no CUDA driver, " + name + ": use --mem heap or --mem malloc");
    return opened;
  }();
  return library;
}

template <class... Args>
void call(const char* name, Args... args) {
  using Function = int (*)(Args...);
  const auto function = reinterpret_cast<Function>(dlsym(driver(), name));
  if (function == nullptr) fail(std::string("the CUDA driver lacks ") + name);
  const int rc = function(args...);
  if (rc != 0) fail(std::string(name) + " returned " + std::to_string(rc));
}

uint64_t address(const void* p) { return reinterpret_cast<uint64_t>(p); }

}  // namespace

bool likely() {
  const char* named = std::getenv("MOECCL_CUDA_DRIVER");
  if (named != nullptr && *named != '\0') return std::string(named) != "none";
  return access("/dev/nvidia0", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

void use(int rank) {
  int devices = 0, device = 0;
  void* context = nullptr;
  call("cuInit", 0u);
  call("cuDeviceGetCount", &devices);
  if (devices < 1) fail("the CUDA driver sees no device: use --mem heap or --mem malloc");
  call("cuDeviceGet", &device, rank % devices);
  thread_local void* retained[64] = {};
  void*& slot = retained[device % 64];
  if (slot == nullptr) call("cuDevicePrimaryCtxRetain", &slot, device);
  context = slot;
  call("cuCtxSetCurrent", context);
}

void* allocate(size_t bytes) {
  uint64_t p = 0;
  call("cuMemAlloc_v2", &p, bytes == 0 ? size_t{1} : bytes);
  return reinterpret_cast<void*>(p);
}
void release(void* data) { call("cuMemFree_v2", address(data)); }
void upload(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  call("cuMemcpyHtoDAsync_v2", address(to), from, bytes, static_cast<void*>(nullptr));
  synchronize(nullptr);
}
void download(void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  call("cuMemcpyDtoHAsync_v2", to, address(from), bytes, static_cast<void*>(nullptr));
  synchronize(nullptr);
}
void clear(void* data, size_t bytes) {
  if (bytes == 0) return;
  call("cuMemsetD8Async", address(data), static_cast<unsigned char>(0), bytes, static_cast<void*>(nullptr));
  synchronize(nullptr);
}
void* make_stream() {
  void* stream = nullptr;
  constexpr unsigned kNonBlocking = 1;
  call("cuStreamCreate", &stream, kNonBlocking);
  return stream;
}
void end_stream(void* stream) { call("cuStreamDestroy_v2", stream); }
void synchronize(void* stream) { call("cuStreamSynchronize", stream); }
void begin_capture(void* stream) {
  constexpr int kThreadLocal = 1;  // the threads of other ranks are not affected
  call("cuStreamBeginCapture_v2", stream, kThreadLocal);
}
void* end_capture(void* stream) {
  void *graph = nullptr, *instance = nullptr;
  call("cuStreamEndCapture", stream, &graph);
  call("cuGraphInstantiateWithFlags", &instance, graph, 0ull);
  call("cuGraphDestroy", graph);
  // The first launch would do it, while replays of ranks on the same device may already wait for this one.
  call("cuGraphUpload", instance, stream);
  synchronize(stream);
  return instance;
}
void launch_graph(void* graph, void* stream) { call("cuGraphLaunch", graph, stream); }
void end_graph(void* graph) { call("cuGraphExecDestroy", graph); }

}  // namespace perf::gpu
