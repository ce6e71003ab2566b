// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of `moeccl postmortem`: the tool, and a folder for MOECCL_DUMP.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace moeccl::testing {

inline std::string tool() {
  return (std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() / "tools" / "moeccl").string();
}

inline std::string output_of(const std::string& command, int* code) {
  std::string text;
  std::FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return "popen failed";
  char buffer[4096];
  for (size_t n; (n = fread(buffer, 1, sizeof(buffer), pipe)) > 0;) text.append(buffer, n);
  *code = WEXITSTATUS(pclose(pipe));
  return text;
}

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/moeccl-postmortem-XXXXXX";
    path_ = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }
  // Returns the report of `moeccl postmortem` on all files in the folder.
  std::string report(int* code) const {
    std::string command = tool() + " postmortem";
    for (const auto& entry : std::filesystem::directory_iterator(path_)) command += " " + entry.path().string();
    return output_of(command, code);
  }

 private:
  std::string path_;
};

}  // namespace moeccl::testing
