// SPDX-License-Identifier: Apache-2.0
#include "src/driver/dynamic_library.h"

#include <dlfcn.h>

namespace moeccl::driver {

DynamicLibrary::~DynamicLibrary() {
  if (handle_ != nullptr) dlclose(handle_);
}

Result<DynamicLibrary> DynamicLibrary::open(const std::string& path, std::initializer_list<const char*> names) {
  std::string reasons;
  const auto try_one = [&](const char* name) {
    DynamicLibrary library;
    library.handle_ = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    library.name_ = name;
    if (library.handle_ == nullptr) {
      const char* why = dlerror();
      reasons += (reasons.empty() ? "" : "; ") + std::string(why == nullptr ? name : why);
    }
    return library;
  };
  if (!path.empty()) {
    DynamicLibrary library = try_one(path.c_str());
    if (library.handle_ != nullptr) return library;
  } else {
    for (const char* name : names) {
      DynamicLibrary library = try_one(name);
      if (library.handle_ != nullptr) return library;
    }
  }
  return error(moecclUnsupported, "{}", reasons);
}

void* DynamicLibrary::symbol(const char* symbol_name) const {
  return handle_ == nullptr ? nullptr : dlsym(handle_, symbol_name);
}

}  // namespace moeccl::driver
