#include "shim/nccl/device.h"

#include <dlfcn.h>

#include <cstdint>

namespace moeccl::shim::device {
namespace {

// The driver's entry points by their binary interface; every one returns 0 for success.
struct Driver {
  int (*init)(unsigned) = nullptr;
  int (*device_count)(int*) = nullptr;
  int (*context_device)(int*) = nullptr;
  int (*retain_primary)(void**, int) = nullptr;
  int (*set_context)(void*) = nullptr;
  int (*pointer_attribute)(void*, int, uint64_t) = nullptr;
  int (*synchronize)(void*) = nullptr;
  int (*copy_to_host)(void*, uint64_t, size_t) = nullptr;
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

const Driver& driver() {
  static const Driver found = [] {
    Driver d;
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return d;
    int devices = 0;
    d.usable = find(library, "cuInit", d.init) && find(library, "cuDeviceGetCount", d.device_count) &&
               find(library, "cuCtxGetDevice", d.context_device) &&
               find(library, "cuDevicePrimaryCtxRetain", d.retain_primary) &&
               find(library, "cuCtxSetCurrent", d.set_context) &&
               find(library, "cuPointerGetAttribute", d.pointer_attribute) &&
               find(library, "cuStreamSynchronize", d.synchronize) &&
               find(library, "cuMemcpyDtoH_v2", d.copy_to_host) && d.init(0) == 0 && d.device_count(&devices) == 0 &&
               devices > 0;
    return d;
  }();
  return found;
}

}  // namespace

bool present() { return driver().usable; }

int current() {
  int ordinal = -1;
  return present() && driver().context_device(&ordinal) == 0 ? ordinal : -1;
}

bool use(int ordinal) {
  if (ordinal < 0 || !present()) return true;
  void* context = nullptr;
  return driver().retain_primary(&context, ordinal) == 0 && driver().set_context(context) == 0;
}

bool owns(const void* pointer) {
  if (pointer == nullptr || !present()) return false;
  const auto address = reinterpret_cast<uint64_t>(pointer);
  unsigned type = 0;
  if (driver().pointer_attribute(&type, kMemoryType, address) != 0 || type != kTypeDevice) return false;
  unsigned managed = 0;
  return driver().pointer_attribute(&managed, kIsManaged, address) != 0 || managed == 0;
}

bool read(void* to, const void* from, size_t bytes, void* stream) {
  return present() && driver().synchronize(stream) == 0 &&
         driver().copy_to_host(to, reinterpret_cast<uint64_t>(from), bytes) == 0;
}

}  // namespace moeccl::shim::device
