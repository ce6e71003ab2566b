// SPDX-License-Identifier: Apache-2.0
// Looks up the names of an enum's values, which are listed in the enum's order.
#pragma once

#include <cstddef>

namespace moeccl {

// Returns names[value], or `unknown` for a value without a name: an enum received from elsewhere may hold any number.
template <size_t N, class Enum>
constexpr const char* name_among(const char* const (&names)[N], Enum value, const char* unknown = "unknown") {
  const auto i = static_cast<size_t>(value);
  return i < N ? names[i] : unknown;
}

}  // namespace moeccl
