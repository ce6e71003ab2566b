// SPDX-License-Identifier: Apache-2.0
// Libraries that a machine may lack and that are opened only on demand.
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

  // Opens the first of `names` that can be opened, or only `path` if it is not empty. Otherwise returns Unsupported
  // with the loader's reasons.
  static Result<DynamicLibrary> open(const std::string& path, std::initializer_list<const char*> names);

  const std::string& name() const { return name_; }
  void* symbol(const char* symbol_name) const;  // null if there is none
  // Sets *function to the symbol. If the library has none, returns Unsupported with the symbol's name.
  template <class Function>
  Status resolve(const char* symbol_name, Function** function) const {
    *function = reinterpret_cast<Function*>(symbol(symbol_name));
    if (*function != nullptr) return {};
    return error(moecclUnsupported, "{} has no function {}: it is too old or another library of that name", name_,
                 symbol_name);
  }
  // Does the same for several symbols: name, function, name, function, ...
  template <class Function, class... More>
  Status resolve(const char* symbol_name, Function** function, const char* next, More... more) const {
    MOECCL_TRY(resolve(symbol_name, function));
    return resolve(next, more...);
  }
  // Sets each function to its symbol, or to null if the library has none.
  template <class Function, class... More>
  void maybe(const char* symbol_name, Function** function, More... more) const {
    *function = reinterpret_cast<Function*>(symbol(symbol_name));
    if constexpr (sizeof...(more) > 0) maybe(more...);
  }
  // Keeps the library open forever, because libraries that start threads or keep state do not survive dlclose.
  void keep() { handle_ = nullptr; }

 private:
  void* handle_ = nullptr;
  std::string name_;
};

}  // namespace moeccl::driver
