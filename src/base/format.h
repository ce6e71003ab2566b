// SPDX-License-Identifier: Apache-2.0
// Text formatting. This header includes only fmt/core.h, so that fmt's code is compiled into the library once, in
// format.cc.
#pragma once

#include <fmt/core.h>

#include <string>
#include <utility>

namespace moeccl {

std::string format_args_to_string(fmt::string_view text, fmt::format_args args);

template <class... Args>
std::string format(fmt::format_string<Args...> text, Args&&... args) {
  return format_args_to_string(text, fmt::make_format_args(args...));
}

// Returns `text` as a JSON string. Control characters become spaces, which is enough for short names and notes.
std::string json_quoted(const std::string& text);

}  // namespace moeccl
