// SPDX-License-Identifier: Apache-2.0
// A sign of life: on a terminal, how long a call has taken, once that is some seconds, and nothing where the errors are
// piped.
#pragma once

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

namespace tools {

class Waiting {
 public:
  explicit Waiting(std::string what) {
    if (isatty(STDERR_FILENO) == 0) return;
    try {
      thread_ = std::thread([this, w = std::move(what)] { show(w); });
    } catch (const std::system_error&) {  // no thread can be made: the call goes without the sign
    }
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() {
    if (!thread_.joinable()) return;
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    end_.notify_one();
    thread_.join();
  }

 private:
  void show(const std::string& what) {
    const auto begin = std::chrono::steady_clock::now();
    std::unique_lock lock(mutex_);
    bool drawn = false;
    for (int seconds = 2; !end_.wait_until(lock, begin + std::chrono::seconds(seconds), [this] { return ended_; });
         ++seconds) {
      // Back at the line's begin, so that what the call prints replaces it.
      std::fprintf(stderr, "\r\033[K%s: %d s so far, Ctrl-C ends it\r", what.c_str(), seconds);
      drawn = true;
    }
    if (drawn) std::fputs("\r\033[K", stderr);
  }

  std::mutex mutex_;
  std::condition_variable end_;
  bool ended_ = false;
  std::thread thread_;  // the last member: it uses the others
};

// Makes a call that may take long, and returns its result.
template <class Call>
auto watched(const char* what, Call&& call) {
  const Waiting waiting(what);
  return call();
}

}  // namespace tools
