// SPDX-License-Identifier: Apache-2.0
#include "src/base/format.h"

#define FMT_HEADER_ONLY 1
#include <fmt/format.h>

namespace moeccl {

std::string format_args_to_string(fmt::string_view text, fmt::format_args args) { return fmt::vformat(text, args); }

std::string json_quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + "\"";
}

}  // namespace moeccl
