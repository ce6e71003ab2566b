// SPDX-License-Identifier: Apache-2.0
// Where NCCL's variables may be set: in the environment, which counts first, in the file that NCCL_CONF_FILE names or
// else ~/.nccl.conf, and in /etc/nccl.conf. This is a header of its own because the library and the shim share only
// this rule.
#pragma once

#include <sys/auxv.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace moeccl {

// Adds the file's lines NCCL_NAME=value, without those of names that are set already.
inline void add_nccl_lines(const std::string& file, std::vector<std::string>* lines) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    const size_t equals = line.find('=');
    if (!line.starts_with("NCCL_") || equals == std::string::npos) continue;
    if (line.back() == '\r') line.pop_back();
    bool set = std::getenv(line.substr(0, equals).c_str()) != nullptr;
    for (const std::string& known : *lines)
      set = set || known.starts_with(std::string_view(line).substr(0, equals + 1));
    if (!set) lines->push_back(std::move(line));
  }
}

inline std::vector<std::string> read_nccl_files() {
  std::vector<std::string> lines;
  // A program with more rights than its user must not open files that the user chooses.
  if (getauxval(AT_SECURE) == 0) {
    const char* const named = std::getenv("NCCL_CONF_FILE");
    if (named != nullptr && *named != '\0') {
      add_nccl_lines(named, &lines);
    } else {
      // Not by the user's entry in a directory of users, which may take long to answer.
      const char* const home = std::getenv("HOME");
      if (home != nullptr && *home != '\0') add_nccl_lines(std::string(home) + "/.nccl.conf", &lines);
    }
  }
  add_nccl_lines("/etc/nccl.conf", &lines);
  return lines;
}

// Returns the lines NCCL_NAME=value of the files that count, as of the first call. Never destroyed.
inline const std::vector<std::string>& nccl_file_lines() {
  static const auto* const lines = new std::vector<std::string>(read_nccl_files());
  return *lines;
}

// Returns the variable's value from the environment or else from the files; null if it is set nowhere.
inline const char* nccl_variable(const char* name) {
  if (const char* value = std::getenv(name); value != nullptr) return value;
  const std::string begin = std::string(name) + "=";
  for (const std::string& line : nccl_file_lines()) {
    if (line.starts_with(begin)) return line.c_str() + begin.size();
  }
  return nullptr;
}

}  // namespace moeccl
