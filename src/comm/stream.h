// SPDX-License-Identifier: Apache-2.0
// Streams: what is put on one runs in order, later. A host stream is a thread; the caller's CUDA streams are in
// cuda_stream.h.
#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "src/base/status.h"
#include "src/comm/group_holds.h"
#include "src/driver/fork_page.h"

namespace moeccl::comm {

class Stream {
 public:
  virtual ~Stream() = default;
  GroupHolds& group_holds() { return group_holds_; }
  // Why nothing that a host thread drives can be put on it now; asked before turns are taken.
  virtual Status ready() { return {}; }
  // The caller's CUDA stream, which takes kernels as they are; null: none.
  virtual class CudaStream* as_cuda() { return nullptr; }
  // Work with everything that it takes to put it on this stream, made before the work's turns are taken.
  struct Work {
    std::list<std::function<Status()>> item;            // one
    std::shared_ptr<struct CudaPut> on_cuda = nullptr;  // of a CUDA stream
  };
  virtual Work hold(std::function<Status()> work) = 0;
  // Takes no memory. The work runs in any case, also when this fails, and ends the turns that it holds.
  virtual Status enqueue(Work work) = 0;
  // Waits until everything put before has run; the first failure since the last call.
  virtual Status synchronize() = 0;

 private:
  GroupHolds group_holds_;
};

class HostStream final : public Stream {
 public:
  HostStream() : thread_([this] { loop(); }) {}
  ~HostStream() override;  // finishes what is on it
  Status ready() override;
  Work hold(std::function<Status()> work) override;
  Status enqueue(Work work) override;
  Status synchronize() override;

 private:
  void loop();

  const driver::Birth birth_;  // a forked child has its queue, but not its thread
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::function<Status()>> queue_;
  uint64_t put_ = 0, run_ = 0;
  bool ending_ = false;
  Status first_failure_;
  std::thread thread_;  // last: it uses the others
};

}  // namespace moeccl::comm
