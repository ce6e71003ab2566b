// SPDX-License-Identifier: Apache-2.0
// One rank's work on a CUDA device: its own stream, the kernels, and the memory through which lists get there. The
// rank's proxy (any thread, one at a time) runs the plan's control flow on the host and launches each step. A signal is
// a store that the stream makes once all steps before it are done, so neither the proxy nor a kernel ever waits for a
// kernel: ranks whose processes take turns on one device cannot block each other.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/table.h"
#include "src/driver/cuda/modules.h"
#include "src/exec/cuda/stream_calls.h"

namespace moeccl::exec {

struct Fabric;

class StreamEngine {
 public:
  // sm_limit: the most multiprocessors that this rank's kernels use; 0: the engine chooses.
  static Result<std::unique_ptr<StreamEngine>> create(driver::cuda::Context context, uint32_t sm_limit);
  // Names the communicator whose failures end the waits below, and whose timeout they have.
  void serve(Fabric& fabric) { fabric_ = &fabric; }

  // Kernels with the contract of the host tables, for memory that the device can access; row lists and terms are in
  // host memory. They act on the engine of the calling thread's innermost Scope, start work, and do not wait for it.
  static const kernels::KernelTable& table();
  class Scope {
   public:
    explicit Scope(StreamEngine& engine);
    ~Scope();

   private:
    StreamEngine* before_;
    driver::cuda::Current current_;
  };

  driver::cuda::Context context() const { return context_; }
  driver::cuda::Stream stream() const { return calls_.stream(); }
  uint32_t sm_limit() const { return sm_limit_; }
  // The first failure of a launch or a wait. It stays, and nothing more is given to the stream.
  const Status& status() const { return calls_.status(); }

  // Stores into host memory that the device can write, once everything before is done and visible.
  void write_word(const void* word, uint64_t value);
  // Waits on the host until the stream's work has ended. A failure of the communicator, or its timeout, which is one,
  // ends this wait too, and the waits of callers' streams for the calling thread's StreamWork.
  Status synchronize();
  // The same for another stream of the communicator's own.
  Status wait_for(driver::cuda::Stream stream, const std::string& what);
  // Waits for the stream's work without a limit, when no caller's stream waits for the communicator any more.
  void drain();

  void copy(void* dst, const void* src, size_t bytes);
  void clear(void* dst, size_t bytes);  // fills with zeros
  // Returns one element of device memory as it is when the stream gets here. Waits on the host; notes a failure.
  kernels::Scalar read_scalar(const void* element, moecclDataType_t type);
  // Copies device memory to the host, through page-locked memory, and waits on the host. A copy to ordinary memory
  // would wait for a lock of the driver, which other threads hold while such copies of theirs wait for their streams.
  void fetch(void* host, const void* device, size_t bytes);
  // Copies host memory to an address that kernels can read until the stream has passed this point.
  const void* upload(const void* host, size_t bytes);
  // Returns device memory with the same lifetime.
  void* scratch(size_t bytes);
  void launch(const std::string& kernel, const void* args, size_t work_bytes);
  // Launches the same kernels on another stream, with a thread for each of `n_threads` items. Any thread.
  Status launch_on(driver::cuda::Stream stream, const char* kernel, const void* args, size_t n_threads) const;
  // Launches this many blocks of 256 threads, or as many as fit on the engine's multiprocessors at once. Any thread.
  Status launch_blocks(driver::cuda::Stream stream, const std::string& name, const void* args, size_t blocks) const;
  // Returns the kernel `name`_`type` for launches on other streams. Any thread.
  driver::cuda::Function function(const char* name, int type) const;
  driver::cuda::Function function(const char* name) const;  // a kernel without types
  void note(Status status) { calls_.note(std::move(status)); }
  size_t memory_bytes() const { return pinned_.bytes() + device_.bytes(); }

 private:
  StreamEngine() = default;
  // Reserves room in both rings. Waits for the stream when they are full.
  bool reserve(size_t bytes, size_t* offset);

  driver::cuda::Context context_ = nullptr;
  uint32_t sm_limit_ = 1;
  std::shared_ptr<const driver::cuda::Modules> modules_;  // of the context: shared with its other engines
  // Rings of the same size. Data in one goes to the same place in the other.
  driver::cuda::Memory pinned_, device_;
  size_t used_ = 0;
  Fabric* fabric_ = nullptr;
  std::atomic<bool> gives_up_{false};  // a failure has ended a wait
  StreamCalls calls_;
};

}  // namespace moeccl::exec
