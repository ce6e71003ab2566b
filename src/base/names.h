// SPDX-License-Identifier: Apache-2.0
// Names of an enum's values, in their order.
#pragma once

#include <cstddef>

namespace moeccl {

// names[value], or `unknown` for a value that has none: an enum that came from elsewhere may hold any number.
template <size_t N, class Enum>
constexpr const char* name_among(const char* const (&names)[N], Enum value, const char* unknown = "unknown") {
  const auto i = static_cast<size_t>(value);
  return i < N ? names[i] : unknown;
}

}  // namespace moeccl
