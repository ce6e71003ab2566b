// SPDX-License-Identifier: Apache-2.0
// What the files of the emulated driver share. fake_driver.cc says what the driver promises.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace moeccl::emulation {
struct Kernel;
}

namespace moeccl::emulation::driver {

// The driver's error numbers.
inline constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidContext = 201,
                     kNoBinary = 209, kPeerUnsupported = 217, kInvalidHandle = 400, kIllegalState = 401,
                     kNotFound = 500, kNotReady = 600, kIllegalAddress = 700, kPeerAlreadyEnabled = 704,
                     kPeerNotEnabled = 705, kAlreadyRegistered = 712, kNotRegistered = 713, kCaptureUnsupported = 900,
                     kCaptureInvalidated = 901, kCaptureMerge = 902, kCaptureUnmatched = 903, kCaptureUnjoined = 904,
                     kCaptureIsolation = 905, kCaptureImplicit = 906, kCapturedEvent = 907, kCaptureWrongThread = 908;
inline constexpr int kMostDevices = 16;

// A function of the driver, for tests that count calls: one object in each function, made known by its first call.
class CallCount {
 public:
  explicit constexpr CallCount(const char* name) : name_(name) {}
  void add();
  // Null: all functions together.
  static uint64_t of(const char* name, bool own_thread);

 private:
  const char* name_;
  std::atomic<uint64_t> n_{0};
  std::atomic<int> index_{-1};
};
#define MOECCL_CALL()                                                                  \
  static constinit ::moeccl::emulation::driver::CallCount moeccl_call_count(__func__); \
  moeccl_call_count.add()

// Whether a rule holds: MOECCL_TEST_CUDA_<name> is not 0.
bool rule(const char* name, bool usual = true);
int n_devices();

class Stream;
struct Channels;
struct Graph;

// A device's primary context.
struct Context {
  explicit Context(int its_device);
  int device;
  std::atomic<int> failed{0};  // once a kernel of it has failed, every call says so
  std::shared_ptr<Channels> channels;
  bool shares_channels = false;

  std::mutex mutex;                              // guards what follows
  int retained = 0;                              // how often
  std::vector<std::shared_ptr<Stream>> streams;  // that have not been destroyed, the default ones too
  std::shared_ptr<Stream> legacy;                // made when it is first used

  // Streams at this moment.
  std::vector<std::shared_ptr<Stream>> all_streams();
  // Waits for all that has been put on its streams, or for the kernels that run.
  void drain();
  void drain_kernels();
};
Context* context_of_device(int device);
Context* current_context();
bool is_context(const void* context);
// What a test wants the function to say (moeccl_emulated_refuse).
int refusal(const char* function);

// The head of most functions: what a call without a context, or on one that has failed, says.
#define MOECCL_IN_CONTEXT(name)                                              \
  MOECCL_CALL();                                                             \
  Context* const name = current_context();                                   \
  if (name == nullptr) return kInvalidContext;                               \
  if (const int refused = refusal(__func__); refused != kOk) return refused; \
  if (name->failed != 0) return name->failed.load()

// Objects by the handles that callers hold.
template <class T>
class Handles {
 public:
  void* add(std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    void* const handle = object.get();
    objects_[handle] = std::move(object);
    return handle;
  }
  // Null for what was never given or has been destroyed.
  std::shared_ptr<T> find(const void* handle) {
    const std::lock_guard lock(mutex_);
    const auto it = objects_.find(handle);
    return it == objects_.end() ? nullptr : it->second;
  }
  std::shared_ptr<T> remove(const void* handle) {
    const std::lock_guard lock(mutex_);
    const auto it = objects_.find(handle);
    if (it == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(it->second);
    objects_.erase(it);
    return object;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<T>> objects_;
};

// One thing for a stream to do.
struct Item {
  enum Kind { kWork, kWait } kind = kWork;
  Context* context = nullptr;  // whose memory it uses
  std::function<void()> run;   // a wait returns when its condition is there, or `context` has failed
  uint32_t room = 0;           // registers that a kernel needs of the device before it starts
  bool kernel = false;
};

// An event: how often it was recorded, and how far the streams have come.
struct Event {
  Context* context = nullptr;
  bool timed = false;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0, time_ns = 0;
  uint64_t capture = 0;             // recorded last in this capture; 0: in none
  std::set<size_t> captured_after;  // there: after these nodes
};

// The function's stream: 0, 1 and 2 are the default streams of the current context. Null: not a stream.
std::shared_ptr<Stream> stream_of(void* handle);
Context* context_of(const Stream& stream);
// Puts work on a stream, or into the graph that it is being captured into.
int put(void* stream, std::function<void()> run);
int put(const std::shared_ptr<Stream>& stream, Item item);
// A call that waits for all of the context's streams, although it does not say so.
void synchronizes(Context& context);
// Calls that may wait for the device, and so are not allowed beside a capture (fake_driver_graphs.cc). 0: allowed.
int unsafe_call();
#define MOECCL_UNSAFE() \
  if (const int refused = unsafe_call(); refused != kOk) return refused

struct Allocation {
  size_t bytes = 0;
  int fd = -1;
  int device = 0;
  int opened = 0;   // by handle, how often; 0: our own
  int opener = -1;  // the device whose context did; another one maps it once more
  int source_pid = 0, source_fd = -1;
  bool mapped = false;   // by cuMemMap
  void* pool = nullptr;  // it was taken from
  uint32_t access = 0;   // bit by device: may be used by its kernels
};
struct Machine {
  std::mutex mutex;
  std::map<uint64_t, Allocation> device;
  std::map<uint64_t, size_t> pinned;
  uint32_t peers[kMostDevices] = {};  // bit by device: those whose contexts reach the memory of this one
};
Machine& machine();
// Both under the machine's lock: the allocation that holds an address, or null; whether it is page-locked.
const Allocation* find_device(uint64_t p, uint64_t* base = nullptr);
bool is_pinned(uint64_t p, uint64_t* base = nullptr, size_t* bytes = nullptr);

// Memory of a device from a new file.
int allocate_device(size_t bytes, uint64_t* out, Allocation as);
// Maps what `fd` holds, as memory of the device.
int map_device(int fd, size_t bytes, uint64_t* out, const Allocation& as);
// What may be done with the pages of an allocation has changed; under the machine's lock.
void protect(uint64_t base, const Allocation& a);
size_t pages(size_t bytes);

// Device memory may be touched by this thread while one lives: what kernels of the context may, or all of it. With
// `kernel`, touching other memory ends the kernel and the context.
class Access {
 public:
  explicit Access(const Context* context, bool kernel = false);
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

// Whether a range that begins in device memory lies in it, and in the context's reach. A copy engine reaches what
// cuMemAlloc gave on every device; memory of cuMemMap and of pools it reaches where kernels do.
bool reaches(const Context& context, uint64_t p, size_t bytes, bool copies = false);
// Whether this processor can tell devices apart.
bool reach_is_checked();

void count_host_wait();
// What a device answers of NICs that reach its memory (fake_driver_rdma.cc).
int rdma_attribute(int attribute);

}  // namespace moeccl::emulation::driver
