// SPDX-License-Identifier: Apache-2.0
// A CUDA driver without a GPU: the functions that MoECCL uses (src/driver/cuda.h), with kernels run by the launch
// emulation. Loaded by MOECCL_CUDA_DRIVER=<this library>; tests call it by the same names as the real one. This file
// has devices and contexts; fake_driver_*.cc have the rest, by subject.
//   Every device has one context, its primary one. Streams, events, modules and memory belong to the context that was
//   current when they were made, and calls without a current context are refused, as by a real driver.
//   Streams are threads that run their work in order, late on purpose when MOECCL_TEST_CUDA_DELAY_US is set
//   (MOECCL_TEST_CUDA_DELAY_DEVICE: only those of this device).
//   A capturing stream keeps its work, and the graph puts all of it on the stream that it is launched on. Calls that
//   are forbidden during a capture are refused, and end the capture.
//   Device memory is a shared file, so that other processes open it by its handle. Only work on a stream touches it:
//   host code that follows a device pointer crashes, as it would with a GPU. A kernel that touches memory that its
//   device cannot reach fails its context for good (700). Both hold where the processor has protection keys; elsewhere
//   memory is merely closed to all threads most of the time that no stream works.
// Rules of a driver that the library does not keep yet, each with a variable that enforces it:
//   MOECCL_TEST_CUDA_CHANNELS=1: the streams of a context share CUDA_DEVICE_MAX_CONNECTIONS hardware channels (8) for
//   each priority, and kernels wait for room on the device. MOECCL_TEST_CUDA_CHANNEL_POOL=1: the channels serve all
//   priorities, and a stream takes a free one when it has work, as on an H100 (docs/gpu-results.md).
//   MOECCL_TEST_CUDA_IMPLICIT_SYNC (0 turns it off): freeing, page-locking, unloading and closing wait for all streams
//   of the context, and copies with pageable memory wait for their own stream. MOECCL_TEST_CUDA_LAZY_LOADING (0 turns
//   it off): loading a function (by its first launch, or by asking for its attributes) waits for the running kernels.
//   MOECCL_TEST_CUDA_UNMAP_WAITS=1: cuMemUnmap and cuMemRelease wait as cuMemFree does, which no GPU has shown yet.
//   MOECCL_TEST_CUDA_QUEUE=<n>: a launch waits while so many items wait on its stream (some 1000 on a GPU).
// Options of a test:
//   MOECCL_TEST_CUDA_REACH=0, MOECCL_TEST_CUDA_KEYS=0: kernels reach all devices' memory; without protection keys.
//   MOECCL_TEST_CUDA_GARBAGE=0: new memory is zero. MOECCL_TEST_CUDA_ARGUMENTS=0: arguments of kernels may be addresses
//   that no device reaches, which a kernel may be passed that does not use them.
//   MOECCL_TEST_CUDA_MPS=1: processes share devices through MPS. (Kernels here always run side by side.)
//   MOECCL_TEST_CUDA_NO_VMM=1: no memory by file descriptors.
//   MOECCL_TEST_CUDA_DEVICES: the number of devices (1); each has 64 multiprocessors.
//   MOECCL_TEST_CUDA_NO_PEERS=1: no device reaches another device's memory.
//   MOECCL_TEST_CUDA_NVLINK=1: NVLink joins all devices.
//   MOECCL_TEST_CUDA_IMAGE_ERROR=<n>: every module is refused with this error, and a line in the linker's log.
//   MOECCL_TEST_CUDA_DRIVER_VERSION: the result of cuDriverGetVersion (13000).
#include "tests/support/cuda_emulation/fake_driver.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "tests/support/cuda_emulation/stream.h"

namespace moeccl::emulation::driver {
namespace {

thread_local Context* current = nullptr;
thread_local int host_waits = 0;

constexpr size_t kMostFunctions = 256;
thread_local std::array<uint64_t, kMostFunctions> own_calls{};  // by CallCount's index

struct Calls {
  std::mutex mutex;
  std::vector<const CallCount*> known;  // indexed by CallCount's index
  struct Refusal {
    int error = kOk, after = 0, times = 0;  // so many calls more pass, and so many after them fail
  };
  std::map<std::string, Refusal> refused;
  std::string held;  // other threads' calls of this function wait
  std::thread::id holder;
  int n_held = 0;
  std::condition_variable released;
};
Calls& calls() {
  static auto* const all = new Calls;
  return *all;
}

}  // namespace

void CallCount::add() {
  n_.fetch_add(1, std::memory_order_relaxed);
  int i = index_.load(std::memory_order_acquire);
  if (i < 0) {
    const std::lock_guard lock(calls().mutex);
    if (index_ < 0) {
      calls().known.push_back(this);
      index_.store(static_cast<int>(calls().known.size()) - 1, std::memory_order_release);
    }
    i = index_;
  }
  ++own_calls[static_cast<size_t>(i) % kMostFunctions];
}

uint64_t CallCount::of(const char* name, bool own_thread) {
  uint64_t n = 0;
  const std::lock_guard lock(calls().mutex);
  for (size_t i = 0; i < calls().known.size(); ++i) {
    const CallCount& c = *calls().known[i];
    if (name == nullptr || std::strcmp(name, c.name_) == 0)
      n += own_thread ? own_calls[i % kMostFunctions] : c.n_.load();
  }
  return n;
}

int refusal(const char* function) {
  std::unique_lock lock(calls().mutex);
  if (calls().held == function && calls().holder != std::this_thread::get_id()) {
    ++calls().n_held;
    calls().released.wait(lock, [&] { return calls().held != function; });
    --calls().n_held;
  }
  const auto it = calls().refused.find(function);
  if (it == calls().refused.end() || it->second.after-- > 0 || it->second.times-- <= 0) return kOk;
  return it->second.error;
}

void count_host_wait() { ++host_waits; }

bool rule(const char* name, bool usual) {
  const char* set = std::getenv((std::string("MOECCL_TEST_CUDA_") + name).c_str());
  return set == nullptr ? usual : std::strcmp(set, "0") != 0;
}

int n_devices() {
  const char* n = std::getenv("MOECCL_TEST_CUDA_DEVICES");
  return n == nullptr ? 1 : std::clamp(std::atoi(n), 1, kMostDevices);
}

Context::Context(int its_device) : device(its_device), channels(std::make_shared<Channels>()) {
  shares_channels = rule("CHANNELS", false);
  if (!shares_channels) {
    channels->n = ~size_t{0};
  } else if (const char* set = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"); set != nullptr)
    channels->n = static_cast<size_t>(std::clamp(std::atoi(set), 1, 32));
  if (shares_channels && rule("CHANNEL_POOL", false)) {
    channels->pool = std::make_shared<Channel>();
    channels->pool->orders.resize(channels->n);
  }
}

std::vector<std::shared_ptr<Stream>> Context::all_streams() {
  const std::lock_guard lock(mutex);
  return streams;
}

void Context::drain() {
  for (const auto& s : all_streams()) s->wait_for(s->submitted());
}

void synchronizes(Context& context) {
  if (rule("IMPLICIT_SYNC")) context.drain();
}
void synchronizes_alone(Context& context) {
  if (!rule("IMPLICIT_SYNC")) return;
  const std::lock_guard busy(context.busy);
  context.drain();
  uint32_t peers = 0;
  {
    const std::lock_guard lock(machine().mutex);
    peers = machine().peers[context.device];
  }
  for (int d = 0; d < n_devices(); ++d)
    if ((peers >> d & 1u) != 0) context_of_device(d)->drain();
}

Context* context_of_device(int device) {
  static auto* const mutex = new std::mutex;
  static auto* const all = new std::array<Context*, kMostDevices>{};
  const std::lock_guard lock(*mutex);
  Context*& c = (*all)[static_cast<size_t>(device)];
  if (c == nullptr) c = new Context(device);
  return c;
}

Context* current_context() { return current; }

bool is_context(const void* context) {
  for (int d = 0; d < kMostDevices; ++d)
    if (context_of_device(d) == context) return true;
  return false;
}

}  // namespace moeccl::emulation::driver

using namespace moeccl::emulation::driver;

EXPORT const int moeccl_emulated_driver = 1;

// For tests: returns how often the calling thread waited for the device, took or gave back memory, or had data cross
// between host and device.
EXPORT int moeccl_emulated_host_waits() { return host_waits; }

// For tests: return how often the process, or the calling thread, has called the function of this name; null: all
// functions.
EXPORT uint64_t moeccl_emulated_calls(const char* name) { return CallCount::of(name, false); }
EXPORT uint64_t moeccl_emulated_own_calls(const char* name) { return CallCount::of(name, true); }

// For tests: makes `times` calls of the function of this name in this process fail with `error`, after `after` others.
EXPORT void moeccl_emulated_refuse(const char* name, int error, int after, int times) {
  const std::lock_guard lock(calls().mutex);
  calls().refused[name] = {error, after, times};
}

// For tests: makes the other threads' calls of the function of this name wait until this is called with an empty name.
// Returns how many wait now.
EXPORT int moeccl_emulated_hold(const char* name) {
  const std::lock_guard lock(calls().mutex);
  calls().held = name;
  calls().holder = std::this_thread::get_id();
  calls().released.notify_all();
  return calls().n_held;
}

EXPORT int cuDriverGetVersion(int* v) {
  MOECCL_COUNT();
  const char* set = std::getenv("MOECCL_TEST_CUDA_DRIVER_VERSION");
  return *v = set == nullptr ? 13000 : std::atoi(set), kOk;
}
namespace {
struct ErrorText {
  int number;
  const char *name, *words;
};
constexpr ErrorText kErrors[] = {
    {kOk, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kNoBinary, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {kPeerUnsupported, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
    {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {kPeerAlreadyEnabled, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {kPeerNotEnabled, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {kAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {kNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureMerge, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
     "operation would result in a merge of separate capture sequences"},
    {kCaptureUnmatched, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "capture was not ended in the same stream as it began"},
    {kCaptureUnjoined, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "capturing stream has unjoined work"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
    {kCaptureWrongThread, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
     "attempt to terminate a thread-local capture sequence from another thread"}};
const ErrorText* error_text(int number) {
  const auto* const it =
      std::find_if(std::begin(kErrors), std::end(kErrors), [&](const ErrorText& e) { return e.number == number; });
  return it == std::end(kErrors) ? nullptr : it;
}
}  // namespace
EXPORT int cuGetErrorString(int error, const char** text) {
  MOECCL_COUNT();
  const ErrorText* const e = error_text(error);
  return *text = e != nullptr ? e->words : nullptr, e != nullptr ? kOk : kInvalidValue;
}
EXPORT int cuGetErrorName(int error, const char** text) {
  MOECCL_COUNT();
  const ErrorText* const e = error_text(error);
  return *text = e != nullptr ? e->name : nullptr, e != nullptr ? kOk : kInvalidValue;
}
EXPORT int cuDeviceGetCount(int* n) {
  MOECCL_CALL();
  return *n = n_devices(), kOk;
}
EXPORT int cuDeviceGet(int* device, int ordinal) {
  MOECCL_CALL();
  if (ordinal < 0 || ordinal >= n_devices()) return kInvalidDevice;
  return *device = ordinal, kOk;
}
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  const char* mps = std::getenv("MOECCL_TEST_CUDA_MPS");
  switch (attribute) {
    case 1:  // threads of a block
      return *value = 1024, kOk;
    case 10:  // threads of a warp
      return *value = 32, kOk;
    case 16:  // multiprocessors
      return *value = static_cast<int>(Room::kSms), kOk;
    case 18:  // integrated
    case 20:  // compute mode
    case 34:  // PCI device
    case 35:  // TCC
    case 50:  // PCI domain
    case 76:  // compute capability, minor
      return *value = 0, kOk;
    case 33:  // PCI bus
      return *value = device + 1, kOk;
    case 39:  // threads of a multiprocessor
      return *value = static_cast<int>(Room::kThreads), kOk;
    case 75:  // compute capability, major
      return *value = 9, kOk;
    case 81:  // shared memory of a multiprocessor
      return *value = 228 << 10, kOk;
    case 82:  // registers of a multiprocessor
      return *value = static_cast<int>(Room::kRegisters), kOk;
    case 103:  // handles that are file descriptors
      return *value = std::getenv("MOECCL_TEST_CUDA_NO_VMM") == nullptr, kOk;
    case 110:  // NICs: fake_driver_rdma.cc
    case 116:
    case 117:
    case 118:
    case 124:
      return *value = rdma_attribute(attribute), kOk;
    case 133:  // MPS
      return *value = mps != nullptr && *mps == '1', kOk;
    default:
      return *value = 1, kOk;
  }
}
EXPORT int cuDeviceGetName(char* name, int bytes, int) {
  MOECCL_CALL();
  std::snprintf(name, static_cast<size_t>(bytes), "emulated device");
  return kOk;
}
EXPORT int cuDeviceGetUuid_v2(void* uuid, int device) {
  MOECCL_CALL();
  std::memset(uuid, device + 1, 16);
  return kOk;
}
EXPORT int cuDeviceGetPCIBusId(char* text, int bytes, int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  std::snprintf(text, static_cast<size_t>(bytes), "0000:%02x:00.0", static_cast<unsigned>(device + 1));
  return kOk;
}
EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int) {
  MOECCL_CALL();
  return *bytes = size_t{80} << 30, kOk;
}

EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  Context* const c = context_of_device(device);
  const std::lock_guard lock(c->mutex);
  ++c->retained;
  return *context = c, kOk;
}
// The context stays even after its last release.
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  Context* const c = context_of_device(device);
  const std::lock_guard lock(c->mutex);
  if (c->retained == 0) return kInvalidContext;
  return --c->retained, kOk;
}
// The context keeps its address, as a real one may, and can be used again at once.
EXPORT int cuDevicePrimaryCtxReset_v2(int device) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  Context* const c = context_of_device(device);
  c->drain();
  streams().remove_if([&](const Stream& s) { return s.context == c; });
  events().remove_if([&](const Event& e) { return e.context == c; });
  for (const auto& s : c->all_streams()) s->end();
  free_all(*c);
  const std::lock_guard lock(c->mutex);
  c->streams.clear();
  c->legacy = nullptr;
  c->retained = 0;
  ++c->resets;
  return kOk;
}
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  MOECCL_CALL();
  if (device < 0 || device >= n_devices()) return kInvalidDevice;
  Context* const c = context_of_device(device);
  const std::lock_guard lock(c->mutex);
  return *flags = 0, *active = c->retained > 0, kOk;
}
EXPORT int cuCtxGetCurrent(void** context) {
  MOECCL_CALL();
  return *context = current, kOk;
}
EXPORT int cuCtxSetCurrent(void* context) {
  MOECCL_CALL();
  if (context != nullptr && !is_context(context)) return kInvalidContext;
  return current = static_cast<Context*>(context), kOk;
}
namespace {
thread_local std::vector<Context*> below;  // contexts below the current one
}
EXPORT int cuCtxPushCurrent_v2(void* context) {
  MOECCL_CALL();
  if (!is_context(context)) return kInvalidContext;
  below.push_back(std::exchange(current, static_cast<Context*>(context)));
  return kOk;
}
EXPORT int cuCtxPopCurrent_v2(void** context) {
  MOECCL_CALL();
  if (current == nullptr) return kInvalidContext;
  if (context != nullptr) *context = current;
  current = below.empty() ? nullptr : below.back();
  if (!below.empty()) below.pop_back();
  return kOk;
}
EXPORT int cuCtxGetDevice(int* device) {
  MOECCL_CALL();
  if (current == nullptr) return kInvalidContext;
  return *device = current->device, kOk;
}
EXPORT int cuCtxGetFlags(unsigned* flags) {
  MOECCL_CALL();
  if (current == nullptr) return kInvalidContext;
  return *flags = 0, kOk;
}
EXPORT int cuCtxGetId(void* context, unsigned long long* id) {
  MOECCL_CALL();
  if (context == nullptr) context = current;
  if (!is_context(context)) return kInvalidContext;
  const auto& c = *static_cast<const Context*>(context);
  return *id = static_cast<unsigned long long>(c.resets) * kMostDevices + static_cast<unsigned>(c.device) + 1, kOk;
}
EXPORT int cuCtxSynchronize() {
  count_host_wait();
  MOECCL_IN_CONTEXT(context);
  if (const int rc = refuse_capturing_context(context); rc != kOk) return rc;
  context->drain();
  return context->failed.load();
}

EXPORT int cuDeviceCanAccessPeer(int* can, int a, int b) {
  MOECCL_CALL();
  if (a < 0 || b < 0 || a >= n_devices() || b >= n_devices()) return kInvalidDevice;
  return *can = a != b && !rule("NO_PEERS", false), kOk;
}
EXPORT int cuDeviceGetP2PAttribute(int* value, int attribute, int a, int b) {
  MOECCL_CALL();
  if (a < 0 || b < 0 || a >= n_devices() || b >= n_devices() || a == b) return kInvalidDevice;
  const bool peers = !rule("NO_PEERS", false);
  constexpr int kRank = 1, kNativeAtomics = 3;
  return *value = attribute != kRank && peers && (attribute != kNativeAtomics || rule("NVLINK", false)), kOk;
}
// From now on, the current context reaches the other device's memory that cuMemAlloc returns or has returned.
namespace {
void set_peer(int owner, int reader, bool may) {
  Machine& m = machine();
  const uint32_t bit = 1u << reader;
  m.peers[owner] = may ? m.peers[owner] | bit : m.peers[owner] & ~bit;
  for (auto& [base, a] : m.device) {
    if (a.device != owner || a.mapped || a.opened > 0 || a.pool != nullptr) continue;
    a.access = may ? a.access | bit : a.access & ~bit;
    protect(base, a);
  }
}
}  // namespace
EXPORT int cuCtxEnablePeerAccess(void* peer, unsigned flags) {
  MOECCL_IN_CONTEXT(context);
  if (flags != 0) return kInvalidValue;
  if (!is_context(peer) || peer == context) return kInvalidContext;
  if (rule("NO_PEERS", false)) return kPeerUnsupported;
  const int owner = static_cast<Context*>(peer)->device;
  const std::lock_guard lock(machine().mutex);
  if ((machine().peers[owner] >> context->device & 1u) != 0) return kPeerAlreadyEnabled;
  return set_peer(owner, context->device, true), kOk;
}
EXPORT int cuCtxDisablePeerAccess(void* peer) {
  MOECCL_IN_CONTEXT(context);
  if (!is_context(peer)) return kInvalidContext;
  const int owner = static_cast<Context*>(peer)->device;
  const std::lock_guard lock(machine().mutex);
  if ((machine().peers[owner] >> context->device & 1u) == 0) return kPeerNotEnabled;
  return set_peer(owner, context->device, false), kOk;
}
