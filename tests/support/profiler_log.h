// SPDX-License-Identifier: Apache-2.0
// What the fake profiler plugin (tests/support/fake_profiler) has noted, and the library's log beside it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/variables.h"

namespace moeccl::testing {

class ProfilerLog {
 public:
  // version: "all", "v2" .. "v5"; script: see fake_profiler.cc.
  explicit ProfilerLog(const std::string& version = "all", const std::string& script = "",
                       const char* variable = "MOECCL_PROFILER_PLUGIN")
      : variables_{{variable, file(version)},
                   {"FAKE_PROFILER", script},
                   {"FAKE_PROFILER_LOG", noted_},
                   {"MOECCL_DEBUG_FILE", log_}} {
    remove();
  }
  ~ProfilerLog() { remove(); }

  static std::string file(const std::string& version) {
    return std::getenv("MOECCL_TEST_PROFILERS") + ("/libnccl-profiler-fake_" + version) + ".so";
  }

  std::vector<std::string> lines() const { return lines_of(noted_); }
  std::vector<std::string> lines_with(const std::string& text) const { return only(lines(), text); }
  size_t n(const std::string& text) const { return lines_with(text).size(); }
  std::vector<std::string> warnings() const { return only(lines_of(log_), "WARN"); }
  std::string all() const {
    std::string text;
    for (const std::string& line : lines()) text += line + "\n";
    return text;
  }

 private:
  static std::vector<std::string> lines_of(const std::string& path) {
    std::vector<std::string> lines;
    std::ifstream in(path);
    for (std::string line; std::getline(in, line);) lines.push_back(line);
    return lines;
  }
  static std::vector<std::string> only(std::vector<std::string> lines, const std::string& text) {
    std::erase_if(lines, [&](const std::string& line) { return line.find(text) == std::string::npos; });
    return lines;
  }
  void remove() const {
    unlink(noted_.c_str());
    unlink(log_.c_str());
  }

  const std::string noted_ = "/tmp/moeccl_profiler_" + std::to_string(getpid()) + ".txt";
  const std::string log_ = "/tmp/moeccl_profiler_" + std::to_string(getpid()) + ".log";
  const Variables variables_;
};

}  // namespace moeccl::testing
