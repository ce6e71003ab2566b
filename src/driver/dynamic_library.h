// SPDX-License-Identifier: Apache-2.0
// Libraries that a machine may lack, opened when they are asked for.
#pragma once

#include <initializer_list>
#include <string>

#include "src/base/status.h"

namespace moeccl::driver {

class DynamicLibrary {
 public:
  DynamicLibrary() = default;
  DynamicLibrary(DynamicLibrary&& other) noexcept { *this = std::move(other); }
  DynamicLibrary& operator=(DynamicLibrary&& other) noexcept {
    std::swap(handle_, other.handle_);
    std::swap(name_, other.name_);
    return *this;
  }
  ~DynamicLibrary();

  // The first of `names` that opens, or `path` alone when it is not empty. Unsupported, with the loader's reason, when
  // none does.
  static Result<DynamicLibrary> open(const std::string& path, std::initializer_list<const char*> names);

  const std::string& name() const { return name_; }
  void* symbol(const char* symbol_name) const;  // null when it is not there
  // *function gets the symbol; Unsupported names it when the library has none.
  template <class Function>
  Status resolve(const char* symbol_name, Function** function) const {
    *function = reinterpret_cast<Function*>(symbol(symbol_name));
    if (*function != nullptr) return {};
    return error(moecclUnsupported, "{} has no function {}: it is too old or another library of that name", name_,
                 symbol_name);
  }
  // The same for several: name, function, name, function, ...
  template <class Function, class... More>
  Status resolve(const char* symbol_name, Function** function, const char* next, More... more) const {
    MOECCL_TRY(resolve(symbol_name, function));
    return resolve(next, more...);
  }
  // Null where the library has none.
  template <class Function, class... More>
  void maybe(const char* symbol_name, Function** function, More... more) const {
    *function = reinterpret_cast<Function*>(symbol(symbol_name));
    if constexpr (sizeof...(more) > 0) maybe(more...);
  }
  // Never closed: libraries that start threads or keep state do not survive dlclose.
  void keep() { handle_ = nullptr; }

 private:
  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace moeccl::driver
