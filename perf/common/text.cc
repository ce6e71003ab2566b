// SPDX-License-Identifier: Apache-2.0
#include "perf/common/text.h"

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "perf/common/fail.h"

namespace perf {

std::string number_text(double value) {
  char buffer[32];
  if (value != 0 && (std::fabs(value) >= 1e6 || std::fabs(value) < 1e-3))
    std::snprintf(buffer, sizeof buffer, "%.3g", value);
  else if (std::fabs(value) >= 100)
    std::snprintf(buffer, sizeof buffer, "%.0f", value);
  else
    std::snprintf(buffer, sizeof buffer, "%.3g", value);
  return buffer;
}

std::string size_text(double bytes) {
  const char* units[] = {"", "K", "M", "G", "T"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    unit++;
  }
  return number_text(bytes) + units[unit];
}

std::string counted(size_t n, const std::string& noun) { return std::to_string(n) + " " + noun + (n == 1 ? "" : "s"); }

double parse_size(const std::string& text) {
  constexpr double kMostBytes = 1e18;  // more than any memory, and safe in a size_t
  char* end = nullptr;
  double number = std::strtod(text.c_str(), &end);
  if (end == text.c_str() || !(number >= 0)) return -1;
  while (*end == ' ') end++;
  switch (*end) {
    case '\0':
      break;
    case 'k':
    case 'K':
      number *= 1024;
      break;
    case 'm':
    case 'M':
      number *= 1024 * 1024;
      break;
    case 'g':
    case 'G':
      number *= 1024 * 1024 * 1024;
      break;
    default:
      return -1;
  }
  return number <= kMostBytes ? number : -1;
}

std::string command_line(int argc, char** argv) {
  std::string line;
  for (int i = 0; i < argc; i++) line += (i == 0 ? "" : " ") + std::string(argv[i]);
  return line;
}

std::string write_text(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path);
  file << text;
  file.close();
  return file ? "" : "cannot write " + path + ": " + std::strerror(errno);
}

void write_or_fail(std::initializer_list<OutputFile> files, int status) {
  bool failed = false;
  for (const OutputFile& file : files) {
    const std::string why = file.path.empty() ? "" : write_text(file.path, file.text);
    if (why.empty()) continue;
    std::fprintf(stderr, "%s\n", why.c_str());
    failed = true;
  }
  if (failed) std::exit(status);
}

}  // namespace perf
