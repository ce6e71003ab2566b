// SPDX-License-Identifier: Apache-2.0
// Logging to stderr or to MOECCL_DEBUG_FILE, one line at a time, with host, process and UTC:
// "moeccl: node7:4117 2026-11-28T09:53:17.123Z WARN text". Each line is written whole, so that lines of different
// threads do not mix. A line that the file has no room for goes to stderr. A pipe that is not read loses lines instead
// of holding up the program.
#pragma once

#include <string>
#include <string_view>

#include "src/base/env.h"
#include "src/base/format.h"

namespace moeccl {

bool log_enabled(LogLevel level);

// Replaces %h and %p in the name of a file that several processes may name alike.
std::string for_process(std::string_view named, std::string_view host, int pid);

// Writes a line without checking the level. Control characters become '?'. After 200 lines within a second, further
// lines of that second are dropped and counted, because a log must not slow down what it observes or fill its disk.
// Errors are never dropped.
void write_log_line(LogLevel level, std::string_view text);
// Formats the text and writes it. When the process has no memory for the line, it is left out, because logging must not
// make its caller fail.
void write_log(LogLevel level, fmt::string_view text, fmt::format_args args) noexcept;

template <class... Args>
void log(LogLevel level, fmt::format_string<Args...> text, Args&&... args) {
  if (log_enabled(level)) write_log(level, text, fmt::make_format_args(args...));
}

}  // namespace moeccl
