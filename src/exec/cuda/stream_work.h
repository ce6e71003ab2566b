// SPDX-License-Identifier: Apache-2.0
// Work on a caller's CUDA stream while a thread drives it.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "src/base/status.h"
#include "src/driver/cuda.h"
#include "src/exec/cuda/stream_engine.h"

namespace moeccl::exec {

// What the proxy is working on, for the communicators that take part.
struct StreamWork {
  driver::cuda::Event ready = nullptr;  // what the caller's stream had before; null: nothing to wait for
  Status put;                           // why the work must not start: it could not take its place in that stream
  bool blocks = false;                  // an operation has ended when its call returns
  std::vector<StreamEngine*> engines;
  // Tells the caller's stream that the work has ended, once; may change its status. Null: nobody waits there. Whoever
  // ends the work's turn calls end() before: the next operation's first command, a wait for its own caller's stream,
  // would else stand before the store, and that stream may share a hardware channel with the one that waits for it.
  std::function<void(Status&)> tell;

  void end(Status& status) {
    if (const auto told = std::exchange(tell, nullptr)) told(status);
  }
  void add(StreamEngine* engine);
  // For work on host memory: waits on the host for what the caller's stream had before.
  Status wait_ready() const;
  static StreamWork* current();  // of this thread; null outside
  // Makes it the calling thread's.
  class Scope {
   public:
    explicit Scope(StreamWork& work);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };
};

}  // namespace moeccl::exec
