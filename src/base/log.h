// SPDX-License-Identifier: Apache-2.0
// One line on stderr: "moeccl: 1234 WARN text". Lines are written whole, so those of many threads do not mix.
#pragma once

#include <string_view>

#include "src/base/env.h"
#include "src/base/format.h"

namespace moeccl {

bool log_enabled(LogLevel level);

// Writes without asking for the level. Control characters become '?'. Beyond 200 lines in a second the rest of that
// second is dropped and counted (a log must not slow or fill what it watches); errors are never dropped.
void write_log_line(LogLevel level, std::string_view text);
// The same of a text to be formatted. What the process has no memory for is left out: a log must not fail what it
// watches.
void write_log(LogLevel level, fmt::string_view text, fmt::format_args args) noexcept;

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> text, Args&&... args) {
  if (log_enabled(level)) write_log(level, text, fmt::make_format_args(args...));
}

}  // namespace moeccl
