// A CUDA driver without a GPU: the functions that MoECCL uses (src/driver/cuda.h), with kernels run by the launch
// emulation. Loaded by MOECCL_CUDA_DRIVER=<this library>; tests call it by the same names as the real one.
//   Streams are threads; they run what is put on them in order, late on purpose when MOECCL_TEST_CUDA_DELAY_US is set.
//   Device memory is a shared file, so that other processes open it by its handle. It is inaccessible to the process
//   (most of the time) but while a stream works: host code that follows a device pointer crashes, as it would with a
//   GPU. A capturing stream keeps what is put on it; the graph puts it all on the stream that it is launched on.
//   MOECCL_TEST_CUDA_MPS=1: processes share devices through MPS. (Kernels here always run side by side.)
//   MOECCL_TEST_CUDA_NO_VMM=1: no memory by file descriptors.
//   MOECCL_TEST_CUDA_DEVICES: how many devices there are (1); each has 64 multiprocessors.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/cuda_emulation/cuda_emulation.h"
#include "tests/support/cuda_emulation/fake_driver.h"

namespace moeccl::emulation::driver {

Machine& machine() {
  static auto* m = new Machine;
  return *m;
}

int map_device(int fd, size_t bytes, uint64_t* out, const Allocation& as) {
  void* p = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
  if (p == MAP_FAILED) return kOutOfMemory;
  const std::lock_guard lock(machine().mutex);
  machine().device[reinterpret_cast<uint64_t>(p)] = as;
  if (machine().open) (void)mprotect(p, bytes, PROT_READ | PROT_WRITE);
  *out = reinterpret_cast<uint64_t>(p);
  return kOk;
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

namespace {

using moeccl::emulation::Kernel;

// Device memory may be touched while one lives.
class Access {
 public:
  Access() {
    const std::lock_guard lock(machine().mutex);
    if (machine().users++ == 0 && !std::exchange(machine().open, true)) protect(PROT_READ | PROT_WRITE);
  }
  ~Access() {
    const std::lock_guard lock(machine().mutex);
    if (--machine().users > 0) return;
    // Changing the pages of all allocations is slow: at first always, then at every eighth rest, which is often enough
    // to catch host code that follows a device pointer.
    if (++machine().rests > 64 && machine().rests % 8 != 0) return;
    machine().open = false;
    protect(PROT_NONE);
  }
  static void protect(int how) {
    for (const auto& [base, a] : machine().device)
      (void)mprotect(reinterpret_cast<void*>(base), a.bytes, a.accessible ? how : PROT_NONE);
  }
};

struct FakeEvent {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
};

using Graph = std::vector<std::function<void()>>;

class FakeStream {
 public:
  FakeStream() : thread_([this] { loop(); }) {}
  ~FakeStream() {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  void put(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    if (graph != nullptr) {
      graph->push_back(std::move(work));
      return;
    }
    queue_.push_back(std::move(work));
    ++put_;
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    const uint64_t until = put_;
    changed_.wait(lock, [&] { return run_ >= until; });
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return run_ == put_;
  }
  Graph* graph = nullptr;  // being captured

 private:
  void loop() {
    const char* delay = std::getenv("MOECCL_TEST_CUDA_DELAY_US");
    const long delay_us = delay == nullptr ? 0 : std::atol(delay);
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
      if (queue_.empty()) return;
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (delay_us > 0) usleep(static_cast<useconds_t>(delay_us));
      work();
      lock.lock();
      ++run_;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t put_ = 0, run_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

FakeStream& default_stream() {
  static auto* s = new FakeStream;
  return *s;
}
// 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are one stream here.
FakeStream& of(void* stream) {
  return reinterpret_cast<uintptr_t>(stream) <= 2 ? default_stream() : *static_cast<FakeStream*>(stream);
}

int n_devices() {
  const char* n = std::getenv("MOECCL_TEST_CUDA_DEVICES");
  return n == nullptr ? 1 : std::atoi(n);
}
int contexts[64];  // their addresses are the contexts
std::atomic<int> launches{0};
thread_local int* current = nullptr;

size_t pages(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

void copy_now(uint64_t dst, uint64_t src, size_t bytes) {
  const Access access;
  std::memmove(reinterpret_cast<void*>(dst), reinterpret_cast<const void*>(src), bytes);
}

}  // namespace

EXPORT const int moeccl_emulated_driver = 1;

// For tests: how many kernels of this process have started, those of graphs too.
EXPORT int moeccl_emulated_launches() { return launches.load(); }

// For tests: how often the calling thread waited for the device, took or gave back memory, or had data cross between
// host and device.
namespace {
thread_local int host_waits = 0;
}
EXPORT int moeccl_emulated_host_waits() { return host_waits; }

EXPORT int cuInit(unsigned) { return kOk; }
EXPORT int cuDriverGetVersion(int* v) { return *v = 13000, kOk; }
EXPORT int cuGetErrorString(int error, const char** text) {
  switch (error) {
    case kInvalidValue:
      return *text = "invalid argument", kOk;
    case kOutOfMemory:
      return *text = "out of memory", kOk;
    case kInvalidContext:
      return *text = "invalid device context", kOk;
    case kNotFound:
      return *text = "named symbol not found", kOk;
    default:
      return *text = "unknown error", kOk;
  }
}
EXPORT int cuDeviceGetCount(int* n) { return *n = n_devices(), kOk; }
EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= n_devices()) return kInvalidValue;
  return *device = ordinal, kOk;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
  const char* mps = std::getenv("MOECCL_TEST_CUDA_MPS");
  *value = attribute == 16    ? 64
           : attribute == 75  ? 9
           : attribute == 76  ? 0
           : attribute == 103 ? std::getenv("MOECCL_TEST_CUDA_NO_VMM") == nullptr
           : attribute == 133 ? mps != nullptr && *mps == '1'
                              : 1;
  return kOk;
}
EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  std::strncpy(name, "emulated device", static_cast<size_t>(bytes));
  return kOk;
}
EXPORT int cuDeviceGetUuid_v2(void* uuid, int device) {
  std::memset(uuid, device + 1, 16);
  return kOk;
}
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) { return *context = &contexts[device], kOk; }
EXPORT int cuCtxGetCurrent(void** context) { return *context = current, kOk; }
EXPORT int cuCtxSetCurrent(void* context) { return current = static_cast<int*>(context), kOk; }
EXPORT int cuCtxGetDevice(int* device) {
  if (current == nullptr) return kInvalidContext;
  return *device = static_cast<int>(current - contexts), kOk;
}
EXPORT int cuDeviceCanAccessPeer(int* can, int a, int b) { return *can = a != b, kOk; }
EXPORT int cuCtxEnablePeerAccess(void*, unsigned) { return kOk; }

EXPORT int cuMemAlloc_v2(uint64_t* out, size_t bytes) {
  ++host_waits;
  if (current == nullptr) return kInvalidContext;
  if (bytes == 0 || bytes > (size_t{1} << 36)) return bytes == 0 ? kInvalidValue : kOutOfMemory;
  Allocation a;
  a.bytes = pages(bytes);
  a.fd = memfd_create("emulated-device-memory", MFD_CLOEXEC);
  if (a.fd < 0 || ftruncate(a.fd, static_cast<off_t>(a.bytes)) != 0) return kOutOfMemory;
  return map_device(a.fd, a.bytes, out, a);
}
EXPORT int cuMemFree_v2(uint64_t p) {
  ++host_waits;
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().device.find(p);
  if (it == machine().device.end() || it->second.opened > 0 || it->second.mapped) return kInvalidValue;
  munmap(reinterpret_cast<void*>(p), it->second.bytes);
  close(it->second.fd);
  machine().device.erase(it);
  return kOk;
}
EXPORT int cuMemHostAlloc(void** p, size_t bytes, unsigned) {
  ++host_waits;
  *p = mmap(nullptr, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const std::lock_guard lock(machine().mutex);
  machine().pinned[reinterpret_cast<uint64_t>(*p)] = pages(bytes);
  return kOk;
}
EXPORT int cuMemFreeHost(void* p) {
  const std::lock_guard lock(machine().mutex);
  const auto it = machine().pinned.find(reinterpret_cast<uint64_t>(p));
  if (it == machine().pinned.end()) return kInvalidValue;
  munmap(p, it->second);
  machine().pinned.erase(it);
  return kOk;
}
EXPORT int cuMemHostRegister_v2(void* p, size_t bytes, unsigned) {
  const std::lock_guard lock(machine().mutex);
  return machine().pinned.emplace(reinterpret_cast<uint64_t>(p), bytes).second ? kOk : kAlreadyRegistered;
}
EXPORT int cuMemHostUnregister(void* p) {
  const std::lock_guard lock(machine().mutex);
  return machine().pinned.erase(reinterpret_cast<uint64_t>(p)) > 0 ? kOk : kNotRegistered;
}
EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* out, void* p, unsigned) {
  const std::lock_guard lock(machine().mutex);
  auto it = machine().pinned.upper_bound(reinterpret_cast<uint64_t>(p));
  if (it == machine().pinned.begin()) return kInvalidValue;
  --it;
  if (reinterpret_cast<uint64_t>(p) >= it->first + it->second) return kInvalidValue;
  return *out = reinterpret_cast<uint64_t>(p), kOk;
}
EXPORT int cuPointerGetAttribute(void* out, int attribute, uint64_t p) {
  const std::lock_guard lock(machine().mutex);
  const auto inside = [&](const auto& map, auto size) {
    auto it = map.upper_bound(p);
    if (it == map.begin()) return false;
    --it;
    return p < it->first + size(it->second);
  };
  const bool device = inside(machine().device, [](const Allocation& a) { return a.bytes; });
  if (!device && !inside(machine().pinned, [](size_t bytes) { return bytes; })) return kInvalidValue;
  *static_cast<unsigned*>(out) = attribute == 2 ? (device ? 2u : 1u) : 0u;
  return kOk;
}

EXPORT int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t bytes, void* stream) {
  of(stream).put([=] { copy_now(dst, src, bytes); });
  return kOk;
}
EXPORT int cuMemcpyHtoDAsync_v2(uint64_t dst, const void* src, size_t bytes, void* stream) {
  ++host_waits;
  return cuMemcpyAsync(dst, reinterpret_cast<uint64_t>(src), bytes, stream);
}
EXPORT int cuMemcpyDtoHAsync_v2(void* dst, uint64_t src, size_t bytes, void* stream) {
  ++host_waits;
  return cuMemcpyAsync(reinterpret_cast<uint64_t>(dst), src, bytes, stream);
}
EXPORT int cuMemsetD8Async(uint64_t dst, unsigned char value, size_t bytes, void* stream) {
  of(stream).put([=] {
    const Access access;
    std::memset(reinterpret_cast<void*>(dst), value, bytes);
  });
  return kOk;
}

EXPORT int cuStreamCreate(void** stream, unsigned) { return *stream = new FakeStream, kOk; }
EXPORT int cuStreamDestroy_v2(void* stream) {
  delete static_cast<FakeStream*>(stream);
  return kOk;
}
EXPORT int cuStreamSynchronize(void* stream) {
  ++host_waits;
  return of(stream).synchronize(), kOk;
}
EXPORT int cuStreamQuery(void* stream) {
  ++host_waits;
  return of(stream).idle() ? kOk : kNotReady;
}
EXPORT int cuStreamIsCapturing(void* stream, int* status) { return *status = of(stream).graph != nullptr, kOk; }
EXPORT int cuStreamBeginCapture_v2(void* stream, int) { return of(stream).graph = new Graph, kOk; }
EXPORT int cuStreamEndCapture(void* stream, void** graph) {
  *graph = of(stream).graph;
  return of(stream).graph = nullptr, kOk;
}
EXPORT int cuGraphInstantiateWithFlags(void** instance, void* graph, unsigned long long) {
  return *instance = new Graph(*static_cast<Graph*>(graph)), kOk;
}
EXPORT int cuGraphLaunch(void* instance, void* stream) {
  for (const auto& work : *static_cast<Graph*>(instance)) of(stream).put(work);
  return kOk;
}
EXPORT int cuGraphGetNodes(void* graph, void**, size_t* n) { return *n = static_cast<Graph*>(graph)->size(), kOk; }
EXPORT int cuGraphDestroy(void* graph) {
  delete static_cast<Graph*>(graph);
  return kOk;
}
EXPORT int cuGraphExecDestroy(void* instance) { return cuGraphDestroy(instance); }
EXPORT int cuStreamWriteValue64_v2(void* stream, uint64_t address, uint64_t value, unsigned) {
  of(stream).put([=] {
    const Access access;
    moeccl::cuda::store_release_system(reinterpret_cast<uint64_t*>(address), value);
  });
  return kOk;
}
EXPORT int cuStreamWaitValue64_v2(void* stream, uint64_t address, uint64_t value, unsigned) {
  of(stream).put([=] {
    const auto* word = reinterpret_cast<const uint64_t*>(address);
    while (static_cast<int64_t>(moeccl::cuda::load_acquire_system(word) - value) < 0) usleep(50);
  });
  return kOk;
}

EXPORT int cuEventCreate(void** event, unsigned) { return *event = new FakeEvent, kOk; }
EXPORT int cuEventDestroy_v2(void* event) {
  delete static_cast<FakeEvent*>(event);
  return kOk;
}
EXPORT int cuEventRecord(void* event, void* stream) {
  auto* e = static_cast<FakeEvent*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(e->mutex);
    number = ++e->recorded;
  }
  of(stream).put([=] {
    const std::lock_guard lock(e->mutex);
    e->reached = number;
    e->changed.notify_all();
  });
  return kOk;
}
EXPORT int cuEventQuery(void* event) {
  ++host_waits;
  auto* e = static_cast<FakeEvent*>(event);
  const std::lock_guard lock(e->mutex);
  return e->reached >= e->recorded ? kOk : kNotReady;
}
EXPORT int cuStreamWaitEvent(void* stream, void* event, unsigned) {
  auto* e = static_cast<FakeEvent*>(event);
  uint64_t number = 0;
  {
    const std::lock_guard lock(e->mutex);
    number = e->recorded;
  }
  of(stream).put([=] {
    std::unique_lock lock(e->mutex);
    e->changed.wait(lock, [&] { return e->reached >= number; });
  });
  return kOk;
}

EXPORT int cuModuleLoadData(void** module, const void*) { return *module = &machine(), kOk; }
EXPORT int cuModuleUnload(void*) { return kOk; }
EXPORT int cuModuleGetFunction(void** function, void*, const char* name) {
  const Kernel* k = moeccl::emulation::find_kernel(name);
  if (k == nullptr) return kNotFound;
  return *function = const_cast<Kernel*>(k), kOk;
}
EXPORT int cuLaunchKernel(void* function, unsigned grid_x, unsigned, unsigned, unsigned block_x, unsigned, unsigned,
                          unsigned, void* stream, void** parameters, void**) {
  const auto* kernel = static_cast<const Kernel*>(function);
  std::vector<char> args(static_cast<const char*>(parameters[0]),
                         static_cast<const char*>(parameters[0]) + kernel->bytes);
  of(stream).put([=] {
    ++launches;
    const Access access;
    alignas(64) char copy[8192];
    if (args.size() > sizeof(copy)) std::abort();
    std::memcpy(copy, args.data(), args.size());
    moeccl::emulation::Launch how;
    how.blocks = grid_x;
    how.threads = block_x;
    how.seed = args.size() + grid_x;
    how.concurrent = std::strncmp(kernel->name, "moeccl_walk", 11) == 0;  // its blocks wait for each other
    moeccl::emulation::launch(*kernel, copy, how);
  });
  return kOk;
}
