// SPDX-License-Identifier: Apache-2.0
// The caller's CUDA stream: operations take their turn in it without the host waiting. A thread (the proxy) runs what
// is put on it; the stream waits, on the device, for a word that says how many have run.
#pragma once

#include <memory>
#include <vector>

#include "src/comm/stream.h"
#include "src/driver/cuda.h"
#include "src/exec/cuda/stream_work.h"

namespace moeccl::comm {

// Where a piece of work stands on the caller's stream.
struct CudaPut {
  uint64_t number = 0;  // what the stream waits for; 0: it does not
  driver::cuda::Event ready = nullptr;
  Status status;  // of putting it there
};

class CudaStream final : public Stream {
 public:
  // The object for the caller's stream; streams live as long as the process because their handles come again. wanted:
  // the context of the communicator that uses it, whose default stream the names 1 and 2 mean; null: the context that
  // is current on this thread. InvalidUsage when there is none, or when the stream belongs to another context.
  static Result<CudaStream*> of(driver::cuda::Stream stream, driver::cuda::Context wanted);

  Status ready() override;
  CudaStream* as_cuda() override { return this; }
  Work hold(std::function<Status()> work) override;
  Status enqueue(Work work) override;
  Status synchronize() override;

  driver::cuda::Stream stream() const { return stream_; }
  Result<bool> capturing() const;
  // Runs on the proxy thread, in its turn, while the stream goes on: for what was launched on the stream already.
  Work hold_watch(std::function<Status()> work) { return proxy_.hold(std::move(work)); }
  void watch(Work work) { (void)proxy_.enqueue(std::move(work)); }

 private:
  CudaStream(driver::cuda::Context context, driver::cuda::Stream stream) : context_(context), stream_(stream) {}
  Status run(const CudaPut& put, const std::function<Status()>& work);
  void tell(uint64_t number, exec::StreamEngine* writer);
  Result<driver::cuda::Event> take_event();

  driver::cuda::Context context_;
  driver::cuda::Stream stream_;
  uint64_t* done_ = nullptr;    // in page-locked memory, from the first work of a thread: how many have run
  const void* last_ = nullptr;  // the engine that stored it last; compared, never followed
  std::mutex mutex_;
  uint64_t put_ = 0;
  std::vector<driver::cuda::Event> free_events_;
  HostStream proxy_;
};

}  // namespace moeccl::comm
