// Work on a caller's CUDA stream while a thread drives it.
#pragma once

#include <vector>

#include "src/base/status.h"
#include "src/driver/cuda.h"
#include "src/exec/cuda/stream_engine.h"

namespace moeccl::exec {

// What the proxy is working on, for the communicators that take part.
struct StreamWork {
  driver::cuda::Event ready = nullptr;  // what the caller's stream had before; null: nothing to wait for
  bool blocks = false;                  // an operation has ended when its call returns
  std::vector<StreamEngine*> engines;

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
