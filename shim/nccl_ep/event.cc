// SPDX-License-Identifier: Apache-2.0
#include "shim/nccl_ep/event.h"

#include <dlfcn.h>

#include <type_traits>

#include "shim/nccl/device.h"
#include "src/base/trusted_library.h"

namespace moeccl::shim::ep {
namespace {

// The driver's entry points by their binary interface; null without CUDA.
struct Driver {
  int (*create)(void**, unsigned) = nullptr;
  int (*synchronize)(void*) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*exchange_capture_mode)(int*) = nullptr;
};

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    if (!device::present()) return d;
    // device.h has checked and loaded it.
    const char* wanted = trusted_variable("MOECCL_CUDA_DRIVER");
    const bool named = wanted != nullptr && *wanted != '\0';
    void* library = dlopen(named ? wanted : "libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) return d;
    const auto find = [&](const char* name, auto& function) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    find("cuEventCreate", d.create);
    find("cuEventSynchronize", d.synchronize);
    find("cuEventDestroy_v2", d.destroy);
    find("cuThreadExchangeStreamCaptureMode", d.exchange_capture_mode);
    return d;
  }();
  return found;
}

}  // namespace

Event::~Event() {
  if (event_ != nullptr) (void)driver().destroy(event_);
}

void Event::record(cudaStream_t stream) {
  constexpr unsigned kNoTimes = 2;  // CU_EVENT_DISABLE_TIMING
  if (device::captures(stream) || driver().create == nullptr) return;
  if (event_ == nullptr && driver().create(&event_, kNoTimes) != 0) event_ = nullptr;
  if (event_ != nullptr) (void)device::record(event_, stream);
}

void Event::wait() const {
  if (event_ == nullptr) return;
  // A wait would end another thread's capture in the global mode, which is the CUDA runtime's default.
  int mode = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, then the thread's own
  if (driver().exchange_capture_mode != nullptr) (void)driver().exchange_capture_mode(&mode);
  (void)driver().synchronize(event_);
  if (driver().exchange_capture_mode != nullptr) (void)driver().exchange_capture_mode(&mode);
}

}  // namespace moeccl::shim::ep
