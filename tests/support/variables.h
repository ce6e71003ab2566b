// SPDX-License-Identifier: Apache-2.0
// Environment variables for one test.
#pragma once

#include <cstdlib>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

namespace moeccl::testing {

// Sets variables for the processes of a test, which read them when they start.
class Variables {
 public:
  Variables(std::initializer_list<std::pair<const char*, std::string>> values) {
    for (const auto& [name, value] : values) {
      names_.push_back(name);
      setenv(name, value.c_str(), 1);
    }
  }
  ~Variables() {
    for (const char* name : names_) unsetenv(name);
  }
  Variables(const Variables&) = delete;
  Variables& operator=(const Variables&) = delete;

 private:
  std::vector<const char*> names_;
};

}  // namespace moeccl::testing
