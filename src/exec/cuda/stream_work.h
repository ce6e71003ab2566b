// SPDX-License-Identifier: Apache-2.0
// Lets a thread drive work that runs on a caller's CUDA stream.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "src/base/status.h"
#include "src/exec/cuda/stream_engine.h"

namespace moeccl::exec {

struct Fabric;

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
  // Let the callers' streams that wait for this work go on, which has failed. Null: none waits.
  std::function<void()> let_stream_go, let_others_go;

  void end(Status& status) {
    if (const auto told = std::exchange(tell, nullptr)) told(status);
  }
  void release() {
    for (const auto* let_go : {&let_stream_go, &let_others_go})
      if (*let_go) (*let_go)();
  }
  void add(StreamEngine* engine);
  // Wait on the host for the earlier work of the caller's stream, or for a failure or an abort of the communicator, or
  // of one of several.
  Status wait_ready(const Fabric& fabric) const { return wait_ready(std::array{&fabric}); }
  Status wait_ready(std::span<const Fabric* const> fabrics) const;
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

// The work that a stream holds when this is made. A call that takes no CUDA stream comes after the work of the
// context's default stream, but not after work that is put there later: the default stream may then wait for a stream
// that waits for this very call.
class EarlierWork {
 public:
  static Result<std::shared_ptr<const EarlierWork>> of(driver::cuda::Context context, driver::cuda::Stream stream);
  static Result<std::shared_ptr<const EarlierWork>> of_default_stream(driver::cuda::Context context) {
    return of(context, nullptr);
  }
  EarlierWork(const EarlierWork&) = delete;
  EarlierWork& operator=(const EarlierWork&) = delete;
  driver::cuda::Context context() const { return context_; }
  driver::cuda::Event end() const { return end_.get(); }
  // Wait on the host, or for a failure or an abort of the communicator, or of one of several.
  Status wait(const Fabric& fabric) const { return wait(std::array{&fabric}); }
  Status wait(std::span<const Fabric* const> fabrics) const;

 private:
  explicit EarlierWork(driver::cuda::Context context) : context_(context) {}
  driver::cuda::Context context_;
  driver::cuda::EventOwner end_;
};

}  // namespace moeccl::exec
