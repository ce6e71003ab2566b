// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl/device.h"

#include <dlfcn.h>

#include <cstdint>
#include <string>

#include "src/base/trusted_library.h"

namespace moeccl::shim::device {
namespace {

// The driver's entry points by their binary interface. Every one returns 0 for success.
struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*context_device)(int*) = nullptr;
  int (*retain_primary)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*pointer_attribute)(void*, int, uint64_t) = nullptr;
  int (*synchronize)(void*) = nullptr;
  int (*copy_to_host)(void*, uint64_t, size_t, void*) = nullptr;
  int (*context)(void**) = nullptr;
  int (*allocate)(uint64_t*, size_t) = nullptr;
  int (*release)(uint64_t) = nullptr;
  int (*create_stream)(void**, unsigned) = nullptr;
  int (*destroy_stream)(void*) = nullptr;
  // Null in drivers too old to matter:
  int (*copy_to_device)(uint64_t, const void*, size_t, void*) = nullptr;
  int (*record_event)(void*, void*) = nullptr;
  int (*create_event)(void**, unsigned) = nullptr;
  int (*synchronize_event)(void*) = nullptr;
  int (*destroy_event)(void*) = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr;
  int (*copy_on_device)(uint64_t, uint64_t, size_t, void*) = nullptr;
  int (*fill)(uint64_t, unsigned char, size_t, void*) = nullptr;
  int (*capture)(void*, int*) = nullptr;
  int (*allocate_on)(uint64_t*, size_t, void*) = nullptr;
  int (*release_on)(uint64_t, void*) = nullptr;
  int devices = 0;
  bool usable = false;
};

constexpr int kMemoryType = 2;       // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kIsManaged = 8;        // CU_POINTER_ATTRIBUTE_IS_MANAGED
constexpr unsigned kTypeDevice = 2;  // CU_MEMORYTYPE_DEVICE

template <class F>
bool find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

// Returns the driver's file; empty if there is to be none, or MoECCL says why it cannot be loaded.
std::string file_of_driver() {
  // The variable is MoECCL's own.
  const char* wanted = trusted_variable("MOECCL_CUDA_DRIVER");
  std::string name = wanted != nullptr ? wanted : "";
  if (name.empty()) return "libcuda.so.1";
  return name == "none" || !why_not_loaded(&name).empty() ? "" : name;
}

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    const std::string name = file_of_driver();
    if (name.empty()) return d;
    void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return d;
    (void)find(library, "cuEventRecord", d.record_event);
    (void)find(library, "cuEventCreate", d.create_event);
    (void)find(library, "cuEventSynchronize", d.synchronize_event);
    (void)find(library, "cuEventDestroy_v2", d.destroy_event);
    (void)find(library, "cuMemcpyHtoDAsync_v2", d.copy_to_device);
    (void)find(library, "cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode);
    (void)find(library, "cuMemcpyDtoDAsync_v2", d.copy_on_device);
    (void)find(library, "cuMemsetD8Async", d.fill);
    (void)find(library, "cuStreamIsCapturing", d.capture);
    (void)find(library, "cuMemAllocAsync", d.allocate_on);
    (void)find(library, "cuMemFreeAsync", d.release_on);
    d.usable = find(library, "cuInit", d.init) && find(library, "cuDeviceGetCount", d.device_count) &&
               find(library, "cuCtxGetDevice", d.context_device) &&
               find(library, "cuDevicePrimaryCtxRetain", d.retain_primary) &&
               find(library, "cuCtxSetCurrent", d.set_context) &&
               find(library, "cuPointerGetAttribute", d.pointer_attribute) &&
               find(library, "cuStreamSynchronize", d.synchronize) &&
               find(library, "cuMemcpyDtoHAsync_v2", d.copy_to_host) && find(library, "cuCtxGetCurrent", d.context) &&
               find(library, "cuMemAlloc_v2", d.allocate) && find(library, "cuMemFree_v2", d.release) &&
               find(library, "cuStreamCreate", d.create_stream) &&
               find(library, "cuStreamDestroy_v2", d.destroy_stream) && d.init(0) == 0 &&
               d.device_count(&d.devices) == 0 && d.devices > 0;
    return d;
  }();
  return found;
}

bool use(int ordinal) {
  void* context = nullptr;
  return driver().retain_primary(&context, ordinal) == 0 && driver().set_context(context) == 0;
}

// Lets the calling thread allocate memory and wait for streams while it, or another thread, captures a stream. Without
// this, such a call would end a capture in the global mode, which is the CUDA runtime's default.
class DuringCaptures {
 public:
  DuringCaptures() { exchange(); }
  ~DuringCaptures() { exchange(); }
  DuringCaptures(const DuringCaptures&) = delete;
  DuringCaptures& operator=(const DuringCaptures&) = delete;

 private:
  void exchange() {
    if (driver().exchange_capture_mode != nullptr) (void)driver().exchange_capture_mode(&mode_);
  }
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, then the thread's own mode
};

}  // namespace

bool present() { return driver().usable; }
int count() { return present() ? driver().devices : 0; }

bool in_use() {
  const std::string name = file_of_driver();
  void* library = name.empty() ? nullptr : dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (library == nullptr) return false;
  int (*context)(void**) = nullptr;
  void* current = nullptr;
  const bool initialized = find(library, "cuCtxGetCurrent", context) && context(&current) == 0;
  (void)dlclose(library);
  return initialized;
}

int current() {
  int ordinal = 0;
  if (!present()) return -1;
  return driver().context_device(&ordinal) == 0 ? ordinal : 0;
}

Current::Current(int ordinal) {
  if (ordinal < 0 || !present()) return;
  ok_ = driver().context(&before_) == 0 && use(ordinal);
}

Current::~Current() {
  if (before_ != nullptr) (void)driver().set_context(before_);
}

bool names(const void* pointer) {
  if (pointer == nullptr || !present()) return false;
  unsigned type = 0;
  return driver().pointer_attribute(&type, kMemoryType, reinterpret_cast<uint64_t>(pointer)) == 0 &&
         type == kTypeDevice;
}

bool knows(const void* pointer) {
  unsigned type = 0;
  return pointer != nullptr && present() &&
         driver().pointer_attribute(&type, kMemoryType, reinterpret_cast<uint64_t>(pointer)) == 0 && type != 0;
}

bool owns(const void* pointer) {
  if (!names(pointer)) return false;
  unsigned managed = 0;
  return driver().pointer_attribute(&managed, kIsManaged, reinterpret_cast<uint64_t>(pointer)) != 0 || managed == 0;
}

bool may_be_stream(const void* stream) {
  const auto value = reinterpret_cast<uintptr_t>(stream);
  return value <= 2 || (value % 8 == 0 && value > 4096);
}

bool read(void* to, const void* from, size_t bytes, void* stream) {
  const DuringCaptures relaxed;
  return present() && driver().copy_to_host(to, reinterpret_cast<uint64_t>(from), bytes, stream) == 0 &&
         driver().synchronize(stream) == 0;
}

bool put(void* to, const void* from, size_t bytes, void* stream) {
  const DuringCaptures relaxed;
  return present() && driver().copy_to_device != nullptr &&
         driver().copy_to_device(reinterpret_cast<uint64_t>(to), from, bytes, stream) == 0 &&
         driver().synchronize(stream) == 0;
}

bool copy(void* to, const void* from, size_t bytes, void* stream) {
  return present() && driver().copy_on_device != nullptr &&
         driver().copy_on_device(reinterpret_cast<uint64_t>(to), reinterpret_cast<uint64_t>(from), bytes, stream) == 0;
}

bool fill(void* to, unsigned char value, size_t bytes, void* stream) {
  return present() && driver().fill != nullptr &&
         driver().fill(reinterpret_cast<uint64_t>(to), value, bytes, stream) == 0;
}

bool captures(void* stream) {
  int status = 0;
  return may_be_stream(stream) && present() && driver().capture != nullptr && driver().capture(stream, &status) == 0 &&
         status != 0;
}

bool synchronize(void* stream) {
  const DuringCaptures relaxed;
  return may_be_stream(stream) && present() && driver().synchronize(stream) == 0;
}

bool record(void* event, void* stream) {
  return may_be_stream(stream) && present() && driver().record_event != nullptr &&
         driver().record_event(event, stream) == 0;
}

Event::~Event() {
  if (event_ != nullptr) (void)driver().destroy_event(event_);
}

void Event::record(void* stream) {
  constexpr unsigned kNoTimes = 2;  // CU_EVENT_DISABLE_TIMING
  if (!present() || captures(stream) || driver().create_event == nullptr) return;
  if (event_ == nullptr && driver().create_event(&event_, kNoTimes) != 0) event_ = nullptr;
  if (event_ != nullptr) (void)device::record(event_, stream);
}

void Event::wait() const {
  if (event_ == nullptr) return;
  const DuringCaptures relaxed;
  (void)driver().synchronize_event(event_);
}

void* allocate(size_t bytes) {
  const DuringCaptures relaxed;
  uint64_t address = 0;
  void* context = nullptr;
  if (!present() || driver().context(&context) != 0 || (context == nullptr && !use(current()))) return nullptr;
  return driver().allocate(&address, bytes > 0 ? bytes : 1) == 0 ? reinterpret_cast<void*>(address) : nullptr;
}

bool release(void* pointer) {
  const DuringCaptures relaxed;
  return present() && driver().release(reinterpret_cast<uint64_t>(pointer)) == 0;
}

void* allocate_on(size_t bytes, void* stream) {
  uint64_t address = 0;
  if (!present() || driver().allocate_on == nullptr) return nullptr;
  return driver().allocate_on(&address, bytes > 0 ? bytes : 1, stream) == 0 ? reinterpret_cast<void*>(address)
                                                                            : nullptr;
}

bool release_on(void* pointer, void* stream) {
  return present() && driver().release_on != nullptr &&
         driver().release_on(reinterpret_cast<uint64_t>(pointer), stream) == 0;
}

Probe::Probe() {
  const DuringCaptures relaxed;
  constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING
  const int ordinal = current();
  if (ordinal < 0 || driver().context(&context_before_) != 0 || !use(ordinal)) return;
  uint64_t address = 0;
  if (driver().allocate(&address, 8) != 0) return;
  word_ = reinterpret_cast<void*>(address);
  if (driver().create_stream(&stream_, kNonBlocking) != 0) stream_ = nullptr;
}

Probe::~Probe() {
  if (!present()) return;
  const DuringCaptures relaxed;
  if (stream_ != nullptr) (void)driver().destroy_stream(stream_);
  if (word_ != nullptr) (void)driver().release(reinterpret_cast<uint64_t>(word_));
  (void)driver().set_context(context_before_);
}

bool Probe::synchronize() const { return device::synchronize(stream_); }

}  // namespace moeccl::shim::device
