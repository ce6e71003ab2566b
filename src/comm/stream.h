// A host stream: a thread that runs what is put on it, in order.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "src/base/status.h"

namespace moeccl::comm {

class HostStream {
 public:
  HostStream() : thread_([this] { loop(); }) {}
  ~HostStream();  // finishes what is on it
  void enqueue(std::function<Status()> work);
  // Waits until everything put before has run; the first failure since the last call.
  Status synchronize();

 private:
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<Status()>> queue_;
  uint64_t put_ = 0, run_ = 0;
  bool ending_ = false;
  Status first_failure_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace moeccl::comm
