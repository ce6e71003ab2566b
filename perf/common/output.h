// SPDX-License-Identifier: Apache-2.0
// The exit status of a program whose output could not be written, of the perf programs and of the command `moeccl`.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace perf {

// Ends the program with status 1 and a sentence if its standard output, such as a file on a full disk, lacks something.
inline void check_output_at_exit() {
  static const int once = std::atexit([] {
    const int failed = std::fflush(stdout);
    if (failed == 0 && std::ferror(stdout) == 0) return;
    std::fprintf(stderr, "the output cannot be written%s%s\n", failed != 0 ? ": " : "",
                 failed != 0 ? std::strerror(errno) : "");
    _exit(1);
  });
  static_cast<void>(once);
}

}  // namespace perf
