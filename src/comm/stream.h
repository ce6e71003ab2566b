// Streams: what is put on one runs in order, later. A host stream is a thread; the caller's CUDA streams are in
// cuda_stream.h.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "src/base/status.h"

namespace moeccl::comm {

class Stream {
 public:
  virtual ~Stream() = default;
  // Why nothing that a host thread drives can be put on it now; asked before turns are taken.
  virtual Status ready() { return {}; }
  // The caller's CUDA stream, which takes kernels as they are; null: none.
  virtual class CudaStream* as_cuda() { return nullptr; }
  // The work runs in any case, also when this fails.
  virtual Status enqueue(std::function<Status()> work) = 0;
  // Waits until everything put before has run; the first failure since the last call.
  virtual Status synchronize() = 0;
};

class HostStream final : public Stream {
 public:
  HostStream() : thread_([this] { loop(); }) {}
  ~HostStream() override;  // finishes what is on it
  Status enqueue(std::function<Status()> work) override;
  Status synchronize() override;

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
