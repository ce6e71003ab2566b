// SPDX-License-Identifier: Apache-2.0
// The driver's functions by name, as NVIDIA's Python packages look for them.
#include <dlfcn.h>

#include <string>
#include <string_view>

#include "tests/support/cuda_emulation/fake_driver.h"

using namespace moeccl::emulation::driver;

namespace {

enum Found : int { kFound = 0, kNoSymbol = 1 };  // CUdriverProcAddressQueryResult

void* address_of(const std::string& name) {
  static void* const self = [] {
    Dl_info here;
    return dladdr(reinterpret_cast<void*>(address_of), &here) == 0 ? nullptr : dlopen(here.dli_fname, RTLD_NOW);
  }();
  return self == nullptr ? nullptr : dlsym(self, name.c_str());
}

// A name means the function's newest version, which is the second one for all but this.
void* newest(std::string_view name) {
  if (name == "cuStreamGetCaptureInfo") return nullptr;
  void* const second = address_of(std::string(name) + "_v2");
  return second != nullptr ? second : address_of(std::string(name));
}

}  // namespace

EXPORT int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t, int* found) {
  MOECCL_COUNT();
  if (name == nullptr || function == nullptr || version < 2000) return kInvalidValue;
  *function = newest(name);
  if (found != nullptr) *found = *function == nullptr ? kNoSymbol : kFound;
  return kOk;
}
