// SPDX-License-Identifier: Apache-2.0
// Streams: work that is put on one runs later, in order. A host stream is a thread; the caller's CUDA streams are in
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
#include "src/driver/thread.h"

namespace moeccl::comm {

class Stream {
 public:
  virtual ~Stream() = default;
  GroupHolds& group_holds() { return group_holds_; }
  // Returns the reason if no work that a host thread drives can be put on it now. Called before turns are taken.
  virtual Status ready() { return {}; }
  // Returns the caller's CUDA stream, which accepts kernels directly, or null if this is not one.
  virtual class CudaStream* as_cuda() { return nullptr; }
  // Work together with everything that putting it on this stream needs. Made before the work's turns are taken.
  struct Work {
    std::list<std::function<Status()>> item;            // exactly one
    std::shared_ptr<struct CudaPut> on_cuda = nullptr;  // for a CUDA stream
  };
  virtual Work hold(std::function<Status()> work) = 0;
  // Notes where the stream's earlier work ends, as enqueue() otherwise does. For work that several streams wait for:
  // all must have noted it before one of them waits, because streams may share a hardware channel.
  virtual void note_earlier(Work&) {}
  // Allocates nothing. The work runs in any case, even if this call fails, and ends the turns that it holds.
  virtual Status enqueue(Work work) = 0;
  // Called when all work of a call or group has been put on its streams. Waits for the work that must have ended when
  // the call returns, because the stream itself does not wait for it.
  virtual void settle() {}
  // Waits until all earlier work has run. Returns the first failure since the last call.
  virtual Status synchronize() = 0;

 private:
  GroupHolds group_holds_;
};

class HostStream final : public Stream {
 public:
  // With `waiters_run`, a thread in synchronize() runs the work that the stream's thread has not begun, which saves
  // waking that thread and switching to it. Without it, all work runs on the stream's thread.
  explicit HostStream(bool waiters_run = true)
      : waiters_run_(waiters_run), thread_(driver::started_thread("moeccl-stream", [this] { loop(); })) {}
  ~HostStream() override;  // runs the remaining work
  Status ready() override;
  Work hold(std::function<Status()> work) override;
  Status enqueue(Work work) override;
  Status synchronize() override;
  struct Count {
    uint64_t put = 0, run = 0;
  };
  Count count() const;  // returns how much work was put on the stream, and how much has run

 private:
  void loop();
  void run_first(std::unique_lock<std::mutex>& lock);

  const driver::Birth birth_;  // a forked child has its queue but not its thread
  const bool waiters_run_;
  mutable std::mutex mutex_;
  std::condition_variable work_came_;   // the stream's thread waits for it
  std::condition_variable work_ended_;  // threads in synchronize() wait for it
  uint32_t waiters_ = 0;
  std::list<std::function<Status()>> queue_;
  uint64_t put_ = 0, run_ = 0;
  bool running_ = false;  // a thread is in the work that was first in the queue
  bool ending_ = false;
  Status first_failure_;
  std::thread thread_;  // last, because it uses the others
};

}  // namespace moeccl::comm
