// SPDX-License-Identifier: Apache-2.0
// Shows one line of progress on a terminal, and nothing when the output is piped.
#ifndef PERF_COMMON_PROGRESS_H_
#define PERF_COMMON_PROGRESS_H_

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace perf {

class Progress {
 public:
  // Only the process that prints shows progress.
  explicit Progress(bool leads) : shown_(leads && isatty(STDERR_FILENO) != 0) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  // Draws at most about ten times a second. `done` and `total` have the same unit.
  void show(const std::string& what, double done, double total) {
    const auto now = std::chrono::steady_clock::now();
    if (!shown_ || now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    std::fprintf(stderr, "\r\033[K%3.0f %% %s", total > 0 ? 100 * done / total : 0.0, what.c_str());
    drawn_ = true;
  }
  void clear() {
    if (drawn_) std::fprintf(stderr, "\r\033[K");
    drawn_ = false;
  }

 private:
  bool shown_, drawn_ = false;
  std::chrono::steady_clock::time_point last_ = {};
};

}  // namespace perf

#endif  // PERF_COMMON_PROGRESS_H_
