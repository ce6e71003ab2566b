// SPDX-License-Identifier: Apache-2.0
// Calls that are issued together, and the path of every call to its execution, on this thread or on a stream's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/group_holds.h"
#include "src/comm/stream.h"
#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/cuda/stream_work.h"

namespace moeccl::comm {

// One call, checked and prepared. Communicators and streams outlive the calls on them, because Destroy waits for these,
// and refuses while a call is in an open group.
struct Call {
  Communicator* comm = nullptr;
  Stream* stream = nullptr;                         // null: the call blocks
  std::unique_ptr<exec::Operation> operation = {};  // or `message`
  exec::Message message = {};
  exec::Promise promise = {};  // of a launch that waits for its turn

  exec::Runner& runner() const { return operation != nullptr ? *operation->runner : *message.runner; }
  GroupHolds* maker = nullptr;  // of another handle with which the call was made; may be null
};

// Returns the work on CUDA memory that a call on this stream comes after, for calls that no CUDA stream orders: that of
// the default stream. Null if there is none; a null stream is the calling thread.
Result<std::shared_ptr<const exec::EarlierWork>> earlier_work(Communicator& comm, Stream* stream);

// Held while work is put on `stream` and `n_others` more: what two threads put on the same streams must come in one
// order on all of them. A single CUDA stream needs none, and its driver may block.
std::unique_lock<std::mutex> order_on(Stream* stream, size_t n_others);

// Runs `body` as the calling thread's current work, which comes after `earlier`.
template <class Body>
Status run_after(const exec::EarlierWork* earlier, Body&& body) {
  if (earlier == nullptr) return body();
  const driver::cuda::Current current(earlier->context());
  exec::StreamWork now;
  now.ready = earlier->end();
  now.blocks = true;
  const exec::StreamWork::Scope scope(now);
  return body();
}

// Puts `body` (Status of a ticket) on the stream. The ticket is taken only after everything that can fail.
template <class Body>
Status enqueue_in_turn(Communicator& comm, Stream& stream, Body body) {
  struct Queued {
    Communicator::Hold hold;  // until the work begins; first, so that it ends last
    Body body;
    std::shared_ptr<const exec::EarlierWork> earlier = nullptr;
    uint64_t ticket = 0;
  };
  auto queued = std::make_shared<Queued>(Queued{comm.hold(), std::move(body)});
  MOECCL_ASSIGN_OR_RETURN(queued->earlier, earlier_work(comm, &stream));
  Stream::Work work = stream.hold([queued, &comm] {
    if (!comm.begin_queued()) return comm.usable();
    queued->hold = nullptr;  // until the turn ends, Destroy waits for it
    return run_after(queued->earlier.get(), [&] { return queued->body(queued->ticket); });
  });
  Status status;
  {
    const auto lock = order_on(&stream, 0);
    queued->ticket = comm.queue_ticket();
    status = stream.enqueue(std::move(work));
  }
  stream.settle();
  return status;
}

// Issues a call: into the thread's open group, or to run on this thread or on its stream.
Status issue(Call call);

// For calls that wait for other ranks at once: if the calling thread has an open group, returns InvalidUsage, which the
// group's end then returns too.
Status outside_groups(const char* call);

// The calling thread's open groups.
class Group {
 public:
  static Group& of_this_thread();
  ~Group() { cancel(); }
  // Returns true if this thread has an open group. If no thread has one, this is one load, whereas of_this_thread()
  // costs a call.
  static bool open_here() { return n_open_.load(std::memory_order_relaxed) > 0 && of_this_thread().open(); }
  bool open() const { return depth_ > 0; }
  void start();
  Status end();
  // Closes all of the thread's groups and drops their contents. Returns true if there were any.
  bool cancel();
  void add(Call call);
  // Adds a join, when one thread makes the joins of several ranks. Each runs on a thread of its own at the end of the
  // group.
  void add_join(std::function<Status()> join) { joins_.push_back(std::move(join)); }
  // Records that a call in the group failed its checks. The end of the group reports this and issues nothing.
  void poison(const Status& status) noexcept {
    if (failure_.ok()) failure_ = contained([&] { return status; });
  }

 private:
  std::vector<Call> take_calls();

  inline static std::atomic<uint32_t> n_open_{0};
  uint32_t process_ = 0;  // driver::process_number() when the group was opened
  int depth_ = 0;
  Status failure_;
  std::vector<Call> calls_;
  std::vector<std::function<Status()>> joins_;
};

}  // namespace moeccl::comm
