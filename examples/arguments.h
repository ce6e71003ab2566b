// SPDX-License-Identifier: Apache-2.0
// Reads the examples' numbers and files. Each function says what is wrong with a text and returns false then.
#pragma once

#include <unistd.h>

#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace training {

inline bool take_whole(const std::string& option, const std::string& text, size_t least, size_t most, size_t* value) {
  const char* const end = text.data() + text.size();
  const auto [last, code] = std::from_chars(text.data(), end, *value);
  if (code == std::errc() && last == end && *value >= least && *value <= most) return true;
  std::fprintf(stderr, "%s: \"%s\" is not a whole number from %zu to %zu\n", option.c_str(), text.c_str(), least, most);
  return false;
}

inline bool take_number(const std::string& option, const std::string& text, double most, double* value) {
  char* end = nullptr;
  *value = std::strtod(text.c_str(), &end);
  if (end != text.c_str() && *end == '\0' && *value >= 0 && *value <= most) return true;
  std::fprintf(stderr, "%s: \"%s\" is not a number from 0 to %g\n", option.c_str(), text.c_str(), most);
  return false;
}

// Returns whether the file can be written, before a long run ends with it. "": no file is wanted.
inline bool can_write(const std::string& path) {
  if (path.empty()) return true;
  const bool there = access(path.c_str(), F_OK) == 0;
  std::FILE* const file = std::fopen(path.c_str(), "a");
  if (file == nullptr) {
    std::perror(("cannot write " + path).c_str());
    return false;
  }
  std::fclose(file);
  if (!there) std::remove(path.c_str());
  return true;
}

}  // namespace training
