// SPDX-License-Identifier: Apache-2.0
// Bytes as hexadecimal digits, for names that are made of hashes.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "src/base/format.h"

namespace moeccl {

inline std::string hex(std::span<const std::byte> bytes) {
  std::string text;
  for (const std::byte b : bytes) text += format("{:02x}", static_cast<unsigned>(b));
  return text;
}

}  // namespace moeccl
