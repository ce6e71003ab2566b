// SPDX-License-Identifier: Apache-2.0
// Small pieces of text that users and other programs write: numbers and comma lists.
#pragma once

#include <charconv>
#include <concepts>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

namespace moeccl {

// Returns the number that the whole text is, in this base, or nothing for anything else and above `most`.
template <std::integral T>
std::optional<T> parse_number(std::string_view text, T most = std::numeric_limits<T>::max(), int base = 10) {
  T value = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, code] = std::from_chars(text.data(), end, value, base);
  if (code != std::errc() || stop != end || value > most) return {};
  return value;
}

// Returns the items of a comma list, which are views of `text`. A comma at its end begins no item.
inline std::vector<std::string_view> comma_items(std::string_view text) {
  std::vector<std::string_view> items;
  while (!text.empty()) {
    items.push_back(text.substr(0, text.find(',')));
    text.remove_prefix(items.back().size() + (items.back().size() < text.size() ? 1 : 0));
  }
  return items;
}

}  // namespace moeccl
