// SPDX-License-Identifier: Apache-2.0
// Runs one piece of work at a time on its own thread.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

#include "src/base/status.h"
#include "src/driver/thread.h"

namespace moeccl::comm {

class Background {
 public:
  Background() : thread_(driver::started_thread("moeccl-work", [this] { loop(); })) {}
  ~Background();  // finishes the work that was started
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Call this only after wait().
  void start(std::function<Status()> work);
  // Blocks until the last work has ended and returns its result, as often as it is called.
  Status wait();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<Status()> work_;
  bool busy_ = false, ending_ = false;
  Status result_;
  std::thread thread_;  // last, because it uses the other members
};

}  // namespace moeccl::comm
