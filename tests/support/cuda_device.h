// SPDX-License-Identifier: Apache-2.0
// CUDA for tests, through the functions of the driver: the real one, or the emulation that MOECCL_CUDA_DRIVER names.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "moeccl/moeccl.h"

namespace moeccl::testing {

class CudaDevice {
 public:
  // Makes device `ordinal` modulo the number of devices current on this thread.
  // Kernels are loaded eagerly, as ranks that share a device need it, unless the environment says otherwise.
  explicit CudaDevice(int ordinal = 0) {
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    const char* name = std::getenv("MOECCL_CUDA_DRIVER");
    library_ = dlopen(name != nullptr ? name : "libcuda.so.1", RTLD_NOW);
    if (library_ == nullptr) return;
    int n = 0, device = 0;
    void* context = nullptr;
    ok_ = call<int(unsigned)>("cuInit", 0u) == 0 && call<int(int*)>("cuDeviceGetCount", &n) == 0 && n > 0 &&
          call<int(int*, int)>("cuDeviceGet", &device, ordinal % n) == 0 &&
          call<int(void**, int)>("cuDevicePrimaryCtxRetain", &context, device) == 0 &&
          call<int(void*)>("cuCtxSetCurrent", context) == 0;
    context_ = context;
  }
  bool ok() const { return ok_; }
  int count() {
    int n = 0;
    return call<int(int*)>("cuDeviceGetCount", &n) == 0 ? n : 0;
  }
  // Ends device `ordinal`'s context, as cudaDeviceReset does.
  void reset(int ordinal = 0) { EXPECT_EQ(call<int(int)>("cuDevicePrimaryCtxReset_v2", ordinal), 0); }
  void make_current() { EXPECT_EQ((call<int(void*)>("cuCtxSetCurrent", context_)), 0); }

  // Returns whether processes share the device through MPS, so that their kernels run side by side.
  bool shared_by_mps() {
    int device = 0, mps = 0;
    return call<int(int*)>("cuCtxGetDevice", &device) == 0 &&
           call<int(int*, int, int)>("cuDeviceGetAttribute", &mps, 133, device) == 0 && mps != 0;
  }

  bool emulated() { return dlsym(library_, "moeccl_emulated_driver") != nullptr; }
  // Emulation only: how many kernels of this process have started, including those of graphs.
  int launches() { return call<int()>("moeccl_emulated_launches"); }
  // Emulation only: bytes of programs that this process's persistent kernels read across the bus.
  int program_bytes() { return call<int()>("moeccl_emulated_program_bytes"); }
  // Emulation only: stores by which this process's kernels released their writes to the whole system.
  uint64_t releases() { return static_cast<uint64_t>(call<int()>("moeccl_emulated_releases")); }
  // Emulation only: how often this process opened another process's memory by a file descriptor.
  int opened_by_descriptor() { return call<int()>("moeccl_emulated_imports"); }

  // Emulation only: how often this process, or this thread, has called the driver's function; null: any function.
  uint64_t calls(const char* function) { return count("moeccl_emulated_calls", function); }
  uint64_t own_calls(const char* function) { return count("moeccl_emulated_own_calls", function); }

  // Emulation only: how often this thread waited for the device, took memory of it, or copied to or from it.
  int host_waits() { return call<int()>("moeccl_emulated_host_waits"); }

  // Emulation only: makes the process's next call of the driver's function, or that after so many others, fail.
  void refuse(const char* function, int error, int after = 0) {
    auto* f = reinterpret_cast<void (*)(const char*, int, int, int)>(dlsym(library_, "moeccl_emulated_refuse"));
    if (f != nullptr) f(function, error, after, 1);
  }

  // Emulation only: makes other threads' calls of the driver's function wait; "": none. Returns how many wait now.
  int hold_calls(const char* function) { return call<int(const char*)>("moeccl_emulated_hold", function); }

  // Allocates memory of cuMemMap, as allocators with growing segments do. Release it with release_mapped().
  void* allocate_mapped(size_t bytes) {
    struct {
      int type = 1, handles = 0, location = 1, device = 0;
      void* windows = nullptr;
      uint64_t flags = 0;
    } properties;
    struct {
      int location = 1, device = 0, flags = 3;
    } access;
    EXPECT_EQ(call<int(int*)>("cuCtxGetDevice", &properties.device), 0);
    access.device = properties.device;
    size_t unit = 0;
    EXPECT_EQ((call<int(size_t*, const void*, int)>("cuMemGetAllocationGranularity", &unit, &properties, 0)), 0);
    if (unit == 0) return nullptr;
    bytes = mapped_bytes_ = (bytes + unit - 1) / unit * unit;
    uint64_t handle = 0, p = 0;
    EXPECT_EQ((call<int(uint64_t*, size_t, const void*, unsigned long long)>("cuMemCreate", &handle, bytes, &properties,
                                                                             0ull)),
              0);
    EXPECT_EQ((call<int(uint64_t*, size_t, size_t, uint64_t, unsigned long long)>("cuMemAddressReserve", &p, bytes,
                                                                                  size_t{0}, uint64_t{0}, 0ull)),
              0);
    EXPECT_EQ((call<int(uint64_t, size_t, size_t, uint64_t, unsigned long long)>("cuMemMap", p, bytes, size_t{0},
                                                                                 handle, 0ull)),
              0);
    EXPECT_EQ((call<int(uint64_t, size_t, const void*, size_t)>("cuMemSetAccess", p, bytes, &access, size_t{1})), 0);
    EXPECT_EQ(call<int(uint64_t)>("cuMemRelease", handle), 0);  // the mapping keeps it alive
    return reinterpret_cast<void*>(p);
  }
  void release_mapped(void* p) {
    const auto address = reinterpret_cast<uint64_t>(p);
    EXPECT_EQ((call<int(uint64_t, size_t)>("cuMemUnmap", address, mapped_bytes_)), 0);
    EXPECT_EQ((call<int(uint64_t, size_t)>("cuMemAddressFree", address, mapped_bytes_)), 0);
  }

  // Allocates memory of the device's default pool, as cudaMallocAsync does.
  void* allocate_from_pool(size_t bytes, void* stream) {
    uint64_t p = 0;
    EXPECT_EQ((call<int(uint64_t*, size_t, void*)>("cuMemAllocAsync", &p, bytes, stream)), 0);
    return reinterpret_cast<void*>(p);
  }
  void release_to_pool(void* p, void* stream) {
    EXPECT_EQ((call<int(uint64_t, void*)>("cuMemFreeAsync", reinterpret_cast<uint64_t>(p), stream)), 0);
  }

  void* allocate(size_t bytes) {
    uint64_t p = 0;
    EXPECT_EQ((call<int(uint64_t*, size_t)>("cuMemAlloc_v2", &p, bytes == 0 ? 1 : bytes)), 0);
    return reinterpret_cast<void*>(p);
  }
  void release(void* p) { EXPECT_EQ((call<int(uint64_t)>("cuMemFree_v2", reinterpret_cast<uint64_t>(p))), 0); }
  void upload(void* to, const void* from, size_t bytes, void* stream = nullptr) {
    if (bytes == 0) return;
    EXPECT_EQ((call<int(uint64_t, const void*, size_t, void*)>("cuMemcpyHtoDAsync_v2", reinterpret_cast<uint64_t>(to),
                                                               from, bytes, stream)),
              0);
    if (stream == nullptr) synchronize(nullptr);
  }
  // Waits for the stream before it copies: a copy to memory that is not page-locked holds a lock of the driver while it
  // waits, and another rank's thread may need the lock to get on.
  void download(void* to, const void* from, size_t bytes, void* stream = nullptr) {
    synchronize(stream);
    if (bytes > 0) {
      EXPECT_EQ((call<int(void*, uint64_t, size_t, void*)>("cuMemcpyDtoHAsync_v2", to, reinterpret_cast<uint64_t>(from),
                                                           bytes, stream)),
                0);
    }
    synchronize(stream);
  }
  void copy(void* to, const void* from, size_t bytes, void* stream) {
    EXPECT_EQ((call<int(uint64_t, uint64_t, size_t, void*)>("cuMemcpyAsync", reinterpret_cast<uint64_t>(to),
                                                            reinterpret_cast<uint64_t>(from), bytes, stream)),
              0);
  }
  // flags: CU_STREAM_NON_BLOCKING, or 0 for a stream that the default stream waits for.
  void* make_stream(unsigned flags = 1) {
    void* s = nullptr;
    EXPECT_EQ((call<int(void**, unsigned)>("cuStreamCreate", &s, flags)), 0);
    return s;
  }
  void end_stream(void* s) { EXPECT_EQ((call<int(void*)>("cuStreamDestroy_v2", s)), 0); }
  // Keeps the stream busy for 0.3 s, as the caller's kernels do.
  void keep_busy(void* s) {
    EXPECT_EQ((call<int(void*, void (*)(void*), void*)>(
                  "cuLaunchHostFunc", s, [](void*) { usleep(300'000); }, nullptr)),
              0);
  }
  void synchronize(void* s) { EXPECT_EQ((call<int(void*)>("cuStreamSynchronize", s)), 0); }
  // Allocates page-locked memory, for end_lock().
  void* lock(size_t bytes) {
    void* p = nullptr;
    EXPECT_EQ((call<int(void**, size_t, unsigned)>("cuMemHostAlloc", &p, bytes, 2u)), 0);
    return p;
  }
  void end_lock(void* p) { EXPECT_EQ(call<int(void*)>("cuMemFreeHost", p), 0); }
  // A word of page-locked memory, initially zero, and a wait of a stream until the word is at least `value`.
  uint64_t* make_word() {
    void* p = nullptr;
    EXPECT_EQ((call<int(void**, size_t, unsigned)>("cuMemHostAlloc", &p, sizeof(uint64_t), 2u)), 0);
    return new (p) uint64_t(0);
  }
  void end_word(uint64_t* word) { EXPECT_EQ(call<int(void*)>("cuMemFreeHost", word), 0); }
  void hold(void* s, const uint64_t* word, uint64_t value) {
    EXPECT_EQ((call<int(void*, uint64_t, uint64_t, unsigned)>("cuStreamWaitValue64_v2", s,
                                                              reinterpret_cast<uint64_t>(word), value, 0u)),
              0);
  }
  // mode is that of CUstreamCaptureMode: 0 global, 1 of this thread, 2 relaxed.
  void begin_capture(void* s, int mode = 2) {
    EXPECT_EQ((call<int(void*, int)>("cuStreamBeginCapture_v2", s, mode)), 0);
  }
  // Sets how this thread treats captures of other threads. Returns the previous mode.
  int exchange_capture_mode(int mode) {
    int other = mode;
    EXPECT_EQ(call<int(int*)>("cuThreadExchangeStreamCaptureMode", &other), 0);
    return other;
  }
  void* make_event() {
    void* e = nullptr;
    EXPECT_EQ((call<int(void**, unsigned)>("cuEventCreate", &e, 2u)), 0);
    return e;
  }
  void end_event(void* e) { EXPECT_EQ(call<int(void*)>("cuEventDestroy_v2", e), 0); }
  void record(void* e, void* s) { EXPECT_EQ((call<int(void*, void*)>("cuEventRecord", e, s)), 0); }
  void wait_event(void* s, void* e) {
    EXPECT_EQ((call<int(void*, void*, unsigned)>("cuStreamWaitEvent", s, e, 0u)), 0);
  }
  int query(void* e) { return call<int(void*)>("cuEventQuery", e); }  // the driver's result
  void* end_capture(void* s) {
    void* graph = nullptr;
    (void)call<int(void*, void**)>("cuStreamEndCapture", s, &graph);
    return graph;
  }
  size_t graph_nodes(void* graph) {
    size_t n = 0;
    EXPECT_EQ((call<int(void*, void**, size_t*)>("cuGraphGetNodes", graph, nullptr, &n)), 0);
    return n;
  }
  // Counts the kernels of a graph.
  size_t graph_kernels(void* graph) {
    size_t n = graph_nodes(graph);
    std::vector<void*> nodes(n);
    EXPECT_EQ((call<int(void*, void**, size_t*)>("cuGraphGetNodes", graph, nodes.data(), &n)), 0);
    size_t kernels = 0;
    for (void* node : nodes) {
      int type = -1;
      EXPECT_EQ((call<int(void*, int*)>("cuGraphNodeGetType", node, &type)), 0);
      kernels += type == 0;
    }
    return kernels;
  }
  // Also uploads the graph: the first launch would do it, and might wait there for another rank's replay.
  void* instantiate(void* graph) {
    void *instance = nullptr, *stream = make_stream();
    EXPECT_EQ((call<int(void**, void*, unsigned long long)>("cuGraphInstantiateWithFlags", &instance, graph, 0ull)), 0);
    EXPECT_EQ((call<int(void*, void*)>("cuGraphUpload", instance, stream)), 0);
    synchronize(stream);
    end_stream(stream);
    return instance;
  }
  void launch_graph(void* instance, void* s) { EXPECT_EQ((call<int(void*, void*)>("cuGraphLaunch", instance, s)), 0); }
  void end_graph(void* graph, void* instance) {
    EXPECT_EQ(call<int(void*)>("cuGraphDestroy", graph), 0);
    EXPECT_EQ(call<int(void*)>("cuGraphExecDestroy", instance), 0);
  }

 private:
  uint64_t count(const char* counter, const char* function) {
    auto* f = reinterpret_cast<uint64_t (*)(const char*)>(dlsym(library_, counter));
    return f == nullptr ? 0 : f(function);
  }
  template <class F, class... Args>
  int call(const char* name, Args... args) {
    auto* f = reinterpret_cast<F*>(dlsym(library_, name));
    return f == nullptr ? -1 : f(args...);
  }
  void* library_ = nullptr;
  void* context_ = nullptr;
  bool ok_ = false;
  size_t mapped_bytes_ = 0;  // of the last allocate_mapped()
};

// A buffer on the device and its copy on the host. It belongs to the device's pool, because cuMemAlloc and cuMemFree
// may wait for all kernels of the device, and a kernel of another thread's rank may be waiting for this rank.
class DeviceBuffer {
 public:
  DeviceBuffer(CudaDevice& device, size_t bytes) : device_(device), bytes_(bytes), stream_(device.make_stream()) {
    data_ = device_.allocate_from_pool(bytes == 0 ? 1 : bytes, stream_);
    device_.synchronize(stream_);
  }
  ~DeviceBuffer() {
    device_.release_to_pool(data_, stream_);
    device_.end_stream(stream_);
  }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  void* data() const { return data_; }
  void put(const std::vector<char>& from, void* stream = nullptr) {
    device_.upload(data_, from.data(), from.size(), stream);
  }
  std::vector<char> get(void* stream = nullptr) {
    std::vector<char> out(bytes_);
    device_.download(out.data(), data_, bytes_, stream);
    return out;
  }

 private:
  CudaDevice& device_;
  size_t bytes_;
  void *stream_, *data_ = nullptr;
};

}  // namespace moeccl::testing
