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

// The work that the proxy currently does, for the communicators that take part.
struct StreamWork {
  driver::cuda::Event ready = nullptr;  // the end of the caller's stream's earlier work; null: nothing to wait for
  Status put;                           // why the work must not start: it could not take its place in that stream
  bool blocks = false;                  // an operation must have ended when its call returns
  std::vector<StreamEngine*> engines;
  // Tells the caller's stream that the work has ended, once; may change the work's status. Null: nothing waits there.
  // The code that ends the work's turn must call end() first. Otherwise the next operation's first command, a wait for
  // its own caller's stream, would precede the store, and that stream may share a hardware channel with the one that
  // waits for the store.
  std::function<void(Status&)> tell;

  void end(Status& status) {
    if (const auto told = std::exchange(tell, nullptr)) told(status);
  }
  void add(StreamEngine* engine);
  // For work on host memory: waits on the host for the earlier work of the caller's stream.
  Status wait_ready() const;
  static StreamWork* current();  // the calling thread's; null if it has none
  // Makes `work` the calling thread's current work.
  class Scope {
   public:
    explicit Scope(StreamWork& work);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };
};

}  // namespace moeccl::exec
