// SPDX-License-Identifier: Apache-2.0
// Text formatting. Only fmt/core.h is included here, so that fmt's code is compiled once, in format.cc, into the
// library.
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

// As a JSON string: only what must be escaped is; names and notes are short.
std::string json_quoted(const std::string& text);

}  // namespace moeccl
