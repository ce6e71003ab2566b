// SPDX-License-Identifier: Apache-2.0
// The caller's CUDA stream: operations take their turn in it without making the host wait. A thread (the proxy) runs
// the work that is put on it. The stream waits, on the device, for a word that says that the work has run. Where that
// could hang the program (bears_waits()), or as many streams wait as the device bears (exec::streams_that_may_wait),
// the call waits in the stream's place.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "src/comm/stream.h"
#include "src/driver/cuda.h"
#include "src/driver/cuda/idle.h"
#include "src/exec/cuda/stream_work.h"

namespace moeccl::comm {

// A context and its number (driver::cuda::number_of).
using Home = std::pair<driver::cuda::Context, uint64_t>;

// The position of a piece of work on the caller's stream.
struct CudaPut {
  uint64_t number = 0;  // the count of work with it; 0: it was not put
  // In page-locked memory: the stream waits for the number here. No other work uses the word until this one has run, so
  // a store that comes late, after a failure, changes nothing for others.
  uint64_t* word = nullptr;
  driver::cuda::Event ready = nullptr;
  Status status;  // of putting the work on the stream
  std::optional<driver::cuda::InFlight> in_flight;
};

class CudaStream final : public Stream {
 public:
  // Returns the object for the caller's stream. These objects live as long as the process, because stream handles are
  // reused. Those of a context that was reset are not used again. `wanted` is the context of the communicator that uses
  // the stream; the names 1 and 2 mean its default streams, and 2 (CU_STREAM_PER_THREAD) means that of the calling
  // thread. If it is null, the context that is current on this thread is used. Returns InvalidUsage if there is none,
  // or if the stream belongs to another context.
  static Result<CudaStream*> of(driver::cuda::Stream stream, driver::cuda::Context wanted);
  // Allocates what some dozen streams need. An allocation may wait for the device, and so for a kernel that waits for
  // this rank; a communicator calls this before it runs anything. Without the memory, the first operation tries again.
  static void prepare(driver::cuda::Context context);

  Status ready() override;
  CudaStream* as_cuda() override { return this; }
  Work hold(std::function<Status()> work) override;
  void note_earlier(Work& work) override;
  Status enqueue(Work work) override;
  void settle() override;
  Status synchronize() override;

  // Takes the stream's place among those that may wait on the device, until the next work that is put on it has run.
  // Returns false if all places are taken.
  bool may_wait();
  driver::cuda::Stream stream() const { return stream_; }
  driver::cuda::Context context() const { return home_.first; }
  Result<bool> capturing() const;
  // Runs on the proxy thread, in its turn, while the stream continues. For work that was already launched on the
  // stream.
  Work hold_watch(std::function<Status()> work) { return proxy_.hold(std::move(work)); }
  void watch(Work work) { (void)proxy_.enqueue(std::move(work)); }

 private:
  CudaStream(Home home, driver::cuda::Stream stream) : home_(home), stream_(stream) {}
  static CudaStream* of_this_thread(Home home);
  bool ended(uint64_t n_run) const;
  Status note(CudaPut& put);
  Status run(const CudaPut& put, const std::function<Status()>& work);
  Result<driver::cuda::Event> take_event();
  Result<uint64_t*> take_word();
  bool bears_waits() const;
  Status wait_on_device(const CudaPut& put);

  Home home_;
  driver::cuda::Stream stream_;
  std::mutex enqueue_mutex_;  // held from taking a number to handing the work to the proxy; taken before mutex_
  std::mutex mutex_;
  uint64_t put_ = 0;
  // The last work for which the stream does not wait; settle() does. Null: there was none.
  const uint64_t* unwaited_word_ = nullptr;
  uint64_t unwaited_ = 0;
  std::vector<driver::cuda::Event> free_events_;
  std::vector<uint64_t*> free_words_;
  HostStream proxy_{/*waiters_run=*/false};  // the context is current on its thread
};

}  // namespace moeccl::comm
