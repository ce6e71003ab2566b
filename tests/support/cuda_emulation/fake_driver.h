// SPDX-License-Identifier: Apache-2.0
// Shared by the files of the emulated driver. fake_driver.cc says what the driver promises.
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
inline constexpr int kOk = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101,
                     kInvalidContext = 201, kNoBinary = 209, kPeerUnsupported = 217, kInvalidHandle = 400,
                     kIllegalState = 401, kNotFound = 500, kNotReady = 600, kIllegalAddress = 700,
                     kPeerAlreadyEnabled = 704, kPeerNotEnabled = 705, kAlreadyRegistered = 712, kNotRegistered = 713,
                     kCaptureUnsupported = 900, kCaptureInvalidated = 901, kCaptureMerge = 902, kCaptureUnmatched = 903,
                     kCaptureUnjoined = 904, kCaptureIsolation = 905, kCaptureImplicit = 906, kCapturedEvent = 907,
                     kCaptureWrongThread = 908;
inline constexpr int kMostDevices = 16;

// A function of the driver, for tests that count calls. Each function has one object, which its first call registers.
class CallCount {
 public:
  explicit constexpr CallCount(const char* name) : name_(name) {}
  void add();
  // Null counts all functions together.
  static uint64_t of(const char* name, bool own_thread);

 private:
  const char* name_;
  std::atomic<uint64_t> n_{0};
  std::atomic<int> index_{-1};
};
#define MOECCL_COUNT()                                                                 \
  static constinit ::moeccl::emulation::driver::CallCount moeccl_call_count(__func__); \
  moeccl_call_count.add()
// Returns whether a process that had initialised the driver has forked this one, in which no call works.
bool is_fork();
#define MOECCL_CALL() \
  MOECCL_COUNT();     \
  if (is_fork()) return kNotInitialized

// Returns whether a rule holds: MOECCL_TEST_CUDA_<name> is not 0.
bool rule(const char* name, bool usual = true);
int n_devices();

class Stream;
struct Channels;
struct Graph;

// A device's primary context.
struct Context {
  explicit Context(int its_device);
  int device;
  std::atomic<int> resets{0};
  std::atomic<int> failed{0};  // once a kernel of the context has failed, every call returns this error
  std::shared_ptr<Channels> channels;
  bool shares_channels = false;
  std::mutex busy;      // held by a call that waits inside the driver, and taken by every other call
  std::mutex pageable;  // held while a copy between a stream and memory that is not page-locked waits for the stream

  std::mutex mutex;                              // guards the following fields
  int retained = 0;                              // how many times
  std::vector<std::shared_ptr<Stream>> streams;  // those that have not been destroyed, including the default ones
  std::shared_ptr<Stream> legacy;                // made on first use

  // Returns the streams at this moment.
  std::vector<std::shared_ptr<Stream>> all_streams();
  // Wait for all work on the context's streams, or only for the kernels that run.
  void drain();
};
Context* context_of_device(int device);
Context* current_context();
bool is_context(const void* context);
inline void wait_for_busy(Context& context) { const std::lock_guard lock(context.busy); }
// Returns the error that a test wants from the function (moeccl_emulated_refuse).
int refusal(const char* function);

// The head of most functions: refuses a call without a context, or on a context that has failed.
#define MOECCL_IN_CONTEXT(name)                                              \
  MOECCL_CALL();                                                             \
  Context* const name = current_context();                                   \
  if (name == nullptr) return kInvalidContext;                               \
  if (const int refused = refusal(__func__); refused != kOk) return refused; \
  wait_for_busy(*name);                                                      \
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
  // Returns null for a handle that was never given or has been destroyed.
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
  template <class Chosen>
  void remove_if(Chosen&& chosen) {
    const std::lock_guard lock(mutex_);
    std::erase_if(objects_, [&](const auto& o) { return chosen(*o.second); });
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<T>> objects_;
};

// One item of a stream's work.
struct Item {
  enum Kind { kWork, kWait } kind = kWork;
  Context* context = nullptr;  // the context whose memory it uses
  std::function<void()> run;   // a wait returns when its condition holds or `context` has failed
  uint32_t room = 0;           // registers of the device that a kernel needs before it starts
};

// An event, with how often it was recorded and how far the streams have come.
struct Event {
  Context* context = nullptr;
  bool timed = false;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0, time_ns = 0;
  uint64_t capture = 0;             // the capture in which it was last recorded; 0: none
  std::set<size_t> captured_after;  // the nodes that it comes after in that capture
};

// Returns the function's stream: 0, 1 and 2 are the default streams of the current context. Null: not a stream.
std::shared_ptr<Stream> stream_of(void* handle);
Context* context_of(const Stream& stream);
// Puts work on a stream, or into the graph that the stream is being captured into.
int put(void* stream, std::function<void()> run);
int put(const std::shared_ptr<Stream>& stream, Item item);
// For calls that implicitly wait for all of the context's streams.
void synchronizes(Context& context);
// The same for calls during which no other call of the context returns, as an H200 has shown of cuMemFree. They also
// wait for the devices that reach this one's memory (github.com/pytorch/pytorch/issues/50925).
void synchronizes_alone(Context& context);
// For calls that may wait for the device and are therefore not allowed during a capture (fake_driver_graphs.cc).
// Returns 0 when the call is allowed.
int unsafe_call();
#define MOECCL_UNSAFE() \
  if (const int refused = unsafe_call(); refused != kOk) return refused

struct Allocation {
  size_t bytes = 0;
  int fd = -1;
  int device = 0;
  int opened = 0;   // how often it was opened by handle; 0: this process owns it
  int opener = -1;  // the device whose context opened it; another device maps it once more
  int source_pid = 0, source_fd = -1;
  bool given_out = false;  // by an IPC handle
  bool mapped = false;     // by cuMemMap
  void* pool = nullptr;    // the pool that it was taken from
  uint32_t access = 0;     // bit by device: that device's kernels may use it
};
struct Locked {
  size_t bytes = 0;
  int device = 0;          // of the context that page-locked it
  bool allocated = false;  // by the driver, not by the program
};
struct Machine {
  std::mutex mutex;
  std::map<uint64_t, Allocation> device;
  std::map<uint64_t, Locked> pinned;
  uint32_t peers[kMostDevices] = {};  // bit by device: that device's contexts reach the memory of this one
};
Machine& machine();
// Call these under the machine's lock: the allocation that holds an address, or null, and whether an address is
// page-locked.
const Allocation* find_device(uint64_t p, uint64_t* base = nullptr);
bool is_pinned(uint64_t p, uint64_t* base = nullptr, size_t* bytes = nullptr);

// Allocates memory of a device from a new file.
int allocate_device(size_t bytes, uint64_t* out, Allocation as);
// Maps the memory of `fd` as memory of the device.
int map_device(int fd, size_t bytes, uint64_t* out, const Allocation& as);
// Applies a change of the access rights to an allocation's pages. Call it under the machine's lock.
void protect(uint64_t base, const Allocation& a);
size_t pages(size_t bytes);

// While an Access lives, this thread may touch device memory: that of the context's kernels, or all of it. With
// `kernel`, touching other memory ends the kernel and the context.
class Access {
 public:
  explicit Access(const Context* context, bool kernel = false);
  ~Access();
  Access(const Access&) = delete;
  Access& operator=(const Access&) = delete;
};

// Returns whether a range that begins in device memory lies within it and within the context's reach. A copy engine
// reaches memory of cuMemAlloc on every device; it reaches memory of cuMemMap and of pools where kernels do.
bool reaches(const Context& context, uint64_t p, size_t bytes, bool copies = false);
// Returns whether this processor can tell devices apart.
bool reach_is_checked();

// Fill memory with something, because a driver does not zero what it gives out; of a file, only the beginning.
void spoil(void* p, size_t bytes);
void spoil(int fd, size_t bytes);
// Returns whether the address is in memory of the process that is not page-locked. Call it under the machine's lock.
bool is_pageable(uint64_t p);
// Returns the place of the first address among a kernel's arguments that no device reaches, or `bytes`.
size_t find_pageable(const char* args, size_t bytes);

// Frees the memory of a context that is reset.
void free_all(const Context& context);
void count_host_wait();
// Returns a device's answer about NICs that reach its memory (fake_driver_rdma.cc).
int rdma_attribute(int attribute);

}  // namespace moeccl::emulation::driver
