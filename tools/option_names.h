// SPDX-License-Identifier: Apache-2.0
// The library's messages name C fields. A person at the command line knows options.
#pragma once

#include <cctype>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tools {

// C fields with the options that set them.
using OptionNames = std::vector<std::pair<std::string_view, std::string_view>>;

// Returns the message with each field's option in its place: "problem.n_groups[1] is 9" becomes "--groups[1] is 9". A
// field stands at the beginning, behind "problem." or "config.", or has an underscore; other words may be plain
// English.
inline std::string in_options(std::string_view message, const OptionNames& names) {
  const auto struct_of = [](std::string_view text) -> size_t {
    for (const std::string_view name : {"problem.", "config."})
      if (text.starts_with(name)) return name.size();
    return 0;
  };
  const auto of_word = [](char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; };
  std::string text;
  for (size_t at = 0; at < message.size();) {
    const size_t named = struct_of(message.substr(at));
    const size_t begin = at + named;
    size_t end = begin;
    while (end < message.size() && of_word(message[end])) ++end;
    const std::string_view word = message.substr(begin, end - begin);
    const bool field = at == 0 || named > 0 || word.find('_') != std::string_view::npos;
    std::string_view shown = message.substr(at, end - at);
    for (const auto& [name, option] : names)
      if (field && word == name) shown = option;
    text += shown;
    at = end;
    if (at < message.size()) text += message[at++];
  }
  return text;
}

}  // namespace tools
