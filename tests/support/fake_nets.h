// SPDX-License-Identifier: Apache-2.0
// The fake net plugins (tests/support/fake_net) of this build, and their scripts.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <climits>
#include <string>

namespace moeccl::tests {

// Returns the file of a plugin. versions: "all", "v6" .. "v12".
inline std::string fake_net_file(const std::string& versions) {
  char exe[PATH_MAX] = {};
  if (readlink("/proc/self/exe", exe, sizeof(exe) - 1) < 0) return "";
  std::string at = exe;
  at.resize(at.rfind('/'));
  return at + "/support/fake_net/libnccl-net-fake_" + versions + ".so";
}

class FakeNet {
 public:
  explicit FakeNet(const std::string& versions)
      : file_(fake_net_file(versions)), library_(dlopen(file_.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    script("");
  }
  ~FakeNet() { script(""); }
  FakeNet(const FakeNet&) = delete;
  FakeNet& operator=(const FakeNet&) = delete;

  bool there() const { return library_ != nullptr; }
  const std::string& file() const { return file_; }
  void script(const char* text) const {
    if (auto* set = reinterpret_cast<void (*)(const char*)>(find("fake_net_script")); set != nullptr) set(text);
  }
  long count(const char* call) const {
    auto* get = reinterpret_cast<long (*)(const char*)>(find("fake_net_count"));
    return get == nullptr ? -1 : get(call);
  }

 private:
  void* find(const char* name) const { return library_ == nullptr ? nullptr : dlsym(library_, name); }
  std::string file_;
  void* library_;  // never closed, like all plugins
};

}  // namespace moeccl::tests
