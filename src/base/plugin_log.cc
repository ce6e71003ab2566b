// SPDX-License-Identifier: Apache-2.0
#include "src/base/plugin_log.h"

#include <cstdio>

namespace moeccl {

LogLevel level_of_plugin(int nccls) {
  constexpr int kWarn = 2, kMostOfInfo = 4;
  return nccls == kWarn ? LogLevel::kWarn : nccls <= kMostOfInfo ? LogLevel::kInfo : LogLevel::kTrace;
}

std::optional<std::string> line_of_plugin(const char* text, va_list arguments) {
  char line[512];
  if (text == nullptr || std::vsnprintf(line, sizeof(line), text, arguments) < 0) return std::nullopt;
  std::string whole = line;
  whole.erase(whole.find_last_not_of('\n') + 1);
  return whole;
}

}  // namespace moeccl
