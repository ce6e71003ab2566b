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

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> text, Args&&... args) {
  if (log_enabled(level)) write_log_line(level, format_args_to_string(text, fmt::make_format_args(args...)));
}

}  // namespace moeccl
