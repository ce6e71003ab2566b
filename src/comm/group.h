// SPDX-License-Identifier: Apache-2.0
// Calls that are issued together, and the way of every call to its run: on this thread, or on a stream's.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "src/comm/communicator.h"
#include "src/comm/group_holds.h"
#include "src/comm/stream.h"
#include "src/exec/cuda/persistent_kernel.h"

namespace moeccl::comm {

// One call, checked and prepared. Communicators and streams outlive the calls on them: Destroy waits, and while the
// call is in an open group refuses.
struct Call {
  Communicator* comm = nullptr;
  Stream* stream = nullptr;                         // null: blocking
  std::unique_ptr<exec::Operation> operation = {};  // or
  exec::Message message = {};
  exec::PersistentKernel::Promise promise = {};  // of a launch that waits for its turn

  exec::Runner& runner() const { return operation != nullptr ? *operation->runner : *message.runner; }
  GroupHolds* maker = nullptr;  // of another handle that the call was made with; may be null
};

// Puts `body` (Status of a ticket) on the stream. The ticket is taken when nothing can fail any more.
template <class Body>
Status enqueue_in_turn(Communicator& comm, Stream& stream, Body body) {
  auto ticket = std::make_shared<uint64_t>();
  Stream::Work work = stream.hold([ticket, body = std::move(body)] { return body(*ticket); });
  *ticket = comm.take_ticket();
  return stream.enqueue(std::move(work));
}

// The way of every call: into the thread's open group, to its run on this thread, or onto its stream.
Status issue(Call call);

// The calling thread's open groups.
class Group {
 public:
  static Group& of_this_thread();
  ~Group() { cancel(); }
  // Whether any thread's may be: one load, where this thread's own costs a call.
  static bool any_open() { return n_open_.load(std::memory_order_relaxed) > 0; }
  bool open() const { return depth_ > 0; }
  void start();
  Status end();
  // Closes all of the thread's groups and drops what they hold. Whether there was one.
  bool cancel();
  void add(Call call);
  // Joins that one thread makes for several ranks: each runs on a thread of its own at the end.
  void add_join(std::function<Status()> join) { joins_.push_back(std::move(join)); }
  // A call in the group failed its checks: the end reports it and issues nothing.
  void poison(const Status& status) {
    if (failure_.ok()) failure_ = status;
  }

 private:
  std::vector<Call> take_calls();

  inline static std::atomic<uint32_t> n_open_{0};
  uint32_t process_ = 0;  // driver::process_number() when it was opened
  int depth_ = 0;
  Status failure_;
  std::vector<Call> calls_;
  std::vector<std::function<Status()>> joins_;
};

}  // namespace moeccl::comm
