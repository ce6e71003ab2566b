// SPDX-License-Identifier: Apache-2.0
#include "src/driver/cuda.h"

#include <dlfcn.h>

#include <cstring>
#include <iterator>
#include <utility>

#include "src/base/env.h"
#include "src/base/log.h"
#include "src/base/trusted_library.h"
#include "src/driver/cuda/aside.h"
#include "src/driver/cuda/idle.h"

namespace moeccl::driver::cuda {
namespace {

struct Opened {
  Driver table{};
  bool present = false, emulated = false;
  std::string why;
  void* library = nullptr;
};

bool resolve_all(void* library, Driver& t, std::string* why) {
  const auto resolve = [&](const char* name, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(library, name));
    if (*function == nullptr) *why = format("the CUDA driver lacks {}: it is too old", name);
    return *function != nullptr;
  };
#define MOECCL_RESOLVE(name, ...) &&resolve(#name, &t.name)
  return true MOECCL_CUDA_FUNCTIONS(MOECCL_RESOLVE);
#undef MOECCL_RESOLVE
}

Opened open_driver() {
  Opened o;
  const std::string& wanted = env().cuda_driver;
  if (wanted == "none") {
    o.why = "MOECCL_CUDA_DRIVER=none";
    return o;
  }
  std::string name = wanted;
  if (name.empty()) {
    name = "libcuda.so.1";
  } else if (const std::string why = why_not_loaded(&name); !why.empty()) {
    o.why = "MOECCL_CUDA_DRIVER is not loaded: " + why;
    log(LogLevel::kWarn, "{}", o.why);
    return o;
  }
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    o.why = format("{} cannot be loaded: install the NVIDIA driver", name);
    return o;
  }
  o.library = library;
  if (!resolve_all(library, o.table, &o.why)) return o;
  if (const int rc = o.table.cuInit(0); rc != 0) {
    o.why = format("cuInit returned {}: is there a GPU, and does the driver match the kernel module?", rc);
    return o;
  }
  int devices = 0;
  if (o.table.cuDeviceGetCount(&devices) != 0 || devices == 0) {
    o.why = "the CUDA driver sees no device";
    return o;
  }
  o.emulated = dlsym(library, "moeccl_emulated_driver") != nullptr;
  o.present = true;
  return o;
}

const Opened& opened() {
  static const auto* const o = new Opened(open_driver());  // never destroyed, because threads may outlive main()
  return *o;
}

}  // namespace

const Driver* driver() { return opened().present ? &opened().table : nullptr; }
void* driver_symbol(const char* name) { return opened().present ? dlsym(opened().library, name) : nullptr; }
const std::string& why_absent() { return opened().why; }
bool emulated() { return opened().emulated; }

Status check(int result, const std::string& what) {
  if (result == 0) return {};
  const char* words = nullptr;
  if (driver()->cuGetErrorString(result, &words) != 0 || words == nullptr) words = "unknown error";
  const Code code = result == 2 ? moecclOutOfMemory : moecclSystemError;
  return error(code, "{}: CUDA says \"{}\" ({})", what, words, result);
}

bool loaded() {
  if (!env().cuda_driver.empty()) return opened().library != nullptr;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  if (library != nullptr) dlclose(library);
  return library != nullptr;
}

Context current_context() {
  Context context = nullptr;
  if (!loaded() || driver() == nullptr || driver()->cuCtxGetCurrent(&context) != 0) return nullptr;
  return context;
}

uint64_t number_of(Context context) {
  static const auto ask = reinterpret_cast<int (*)(Context, unsigned long long*)>(driver_symbol("cuCtxGetId"));
  unsigned long long number = 0;
  return ask != nullptr && ask(context, &number) == 0 ? number : 0;
}

// The memory of a program with a driver that lacks what driver() needs.
static Pointed pointed_by_old_driver(const void* pointer) {
  static const auto ask = [] {
    void* const library = opened().library;
    return reinterpret_cast<int (*)(void*, int, Pointer)>(library == nullptr ? nullptr
                                                                             : dlsym(library, "cuPointerGetAttribute"));
  }();
  constexpr int kMemoryType = 2;
  unsigned type = 0;
  Pointed p;
  if (ask != nullptr && ask(&type, kMemoryType, reinterpret_cast<Pointer>(pointer)) == 0) p.type = type;
  return p;
}

Pointed pointed(const void* pointer) {
  if (pointer == nullptr) return {};
  if (driver() == nullptr) return pointed_by_old_driver(pointer);
  // Numbers of the driver's interface: memory type, managed, covered by peer access (legacy IPC), pool, size of the
  // mapping, base of the mapping.
  int attributes[] = {2, 8, 10, 17, 18, 19};
  uint64_t managed = 0, for_peers = 0;  // one byte each
  Pointed p;
  void* out[] = {&p.type, &managed, &for_peers, &p.pool, &p.mapping_bytes, &p.mapping};
  static_assert(std::size(attributes) == std::size(out));
  if (driver()->cuPointerGetAttributes(std::size(attributes), attributes, out, reinterpret_cast<Pointer>(pointer)) != 0)
    return {};
  if (managed != 0) p.type = kUnifiedMemory;
  p.for_peers = for_peers != 0;
  return p;
}

Current::Current(Context context) {
  (void)driver()->cuThreadExchangeStreamCaptureMode(&capture_mode_);
  if (driver()->cuCtxGetCurrent(&before_) != 0) before_ = nullptr;
  if (before_ == context) return;
  changed_ = driver()->cuCtxSetCurrent(context) == 0;
}
Current::~Current() {
  if (changed_) (void)driver()->cuCtxSetCurrent(before_);
  (void)driver()->cuThreadExchangeStreamCaptureMode(&capture_mode_);
}

Memory& Memory::operator=(Memory&& other) noexcept {
  std::swap(context_, other.context_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(pinned_, other.pinned_);
  return *this;
}

Memory::~Memory() {
  if (data_ == nullptr) return;
  when_idle(context_, [data = data_, pinned = pinned_] {
    if (pinned)
      (void)driver()->cuMemFreeHost(data);
    else
      (void)driver()->cuMemFree_v2(reinterpret_cast<Pointer>(data));
  });
}

Result<Memory> Memory::device(Context context, size_t bytes) {
  const Current current(context);
  Memory m;
  Pointer p = 0;
  MOECCL_TRY(check(driver()->cuMemAlloc_v2(&p, bytes), format("{} bytes of device memory", bytes)));
  m.context_ = context;
  m.data_ = reinterpret_cast<std::byte*>(p);
  m.bytes_ = bytes;
  MOECCL_TRY(zero(p, bytes));
  return m;
}

Result<Memory> Memory::pinned(Context context, size_t bytes) {
  const Current current(context);
  constexpr unsigned kPortable = 1, kMapped = 2;
  Memory m;
  void* p = nullptr;
  MOECCL_TRY(
      check(driver()->cuMemHostAlloc(&p, bytes, kPortable | kMapped), format("{} bytes of page-locked memory", bytes)));
  m.context_ = context;
  m.data_ = static_cast<std::byte*>(p);
  m.bytes_ = bytes;
  m.pinned_ = true;
  std::memset(p, 0, bytes);
  return m;
}

}  // namespace moeccl::driver::cuda
