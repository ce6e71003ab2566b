// SPDX-License-Identifier: Apache-2.0
// What plugins that were made for NCCL pass to the function by which they log.
#pragma once

#include <cstdarg>
#include <optional>
#include <string>

#include "src/base/log.h"

namespace moeccl {

// NCCL's level as ours.
LogLevel level_of_plugin(int nccls);
// The text without the ends of lines. Nothing: it is NULL or cannot be formed.
std::optional<std::string> line_of_plugin(const char* text, va_list arguments);

}  // namespace moeccl
