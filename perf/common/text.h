// SPDX-License-Identifier: Apache-2.0
// Sizes and numbers as people write them, and the texts that programs write.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <string>

namespace perf {

// Formats bytes: "4K", "64M".
std::string size_text(double bytes);
// Formats three significant digits without trailing zeros: "0.25", "1200".
std::string number_text(double value);
// Formats "4 ranks" and "1 rank".
std::string counted(size_t n, const std::string& noun);
// Parses "8", "4K", "1.5M", "2G" with binary units. Returns a negative number when the text is not a size.
double parse_size(const std::string& text);

std::string command_line(int argc, char** argv);

// Asks the library for a text: ask(buffer, buffer_bytes, needed) is called for the size and then for the text.
template <class Ask>
std::string explained(Ask&& ask) {
  size_t needed = 0;
  ask(nullptr, size_t{0}, &needed);
  std::string text(needed, '\0');
  ask(text.data(), text.size(), nullptr);
  return text.c_str();
}

// Writes a file. Returns an empty sentence, or why it cannot be written.
std::string write_text(const std::string& path, const std::string& text);
struct OutputFile {
  std::string path, text;  // no path: no file
};
// Writes the files. If some cannot be written, says so for each and then ends the process with `status`.
void write_or_fail(std::initializer_list<OutputFile> files, int status = 1);

}  // namespace perf
