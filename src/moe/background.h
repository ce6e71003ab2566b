// SPDX-License-Identifier: Apache-2.0
// One piece of work at a time on a thread of its own.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "src/base/status.h"

namespace moeccl::comm {

class Background {
 public:
  Background() : thread_([this] { loop(); }) {}
  ~Background();  // finishes what was given
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // After wait() only.
  void start(std::function<Status()> work);
  // Until the work given last has ended; what it returned, again and again.
  Status wait();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<Status()> work_;
  bool busy_ = false, ending_ = false;
  Status result_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace moeccl::comm
