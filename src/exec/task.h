// SPDX-License-Identifier: Apache-2.0
// Tasks: pieces of work that one thread drives side by side by polling, so that one thread may serve several ranks and
// a group's sends and receives cannot block each other.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <span>
#include <string>

#include "src/exec/fabric.h"

namespace moeccl::exec {

// A rank that did not run for this long was itself stopped (a debugger, a batch system, a paused virtual machine),
// perhaps with its peers and its device. It has not waited for them meanwhile, so its deadlines move.
inline constexpr int64_t kStopped_ns = 2'000'000'000;

enum class Progress { kBlocked, kMoved, kDone, kFailed };

inline bool has_left(const Fabric& fabric, uint32_t peer) {
  return fabric.link(peer).board().health.state.load() == static_cast<uint32_t>(transport::RankState::kLeft);
}

class Task {
 public:
  explicit Task(Fabric& fabric) : fabric_(fabric) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // Does what can be done now. Is not called again after kDone or kFailed.
  virtual Progress poll() = 0;
  // Called when the task has been blocked for a while. Looks for reasons that a poll cannot see, such as a peer that
  // calls something else.
  virtual Status diagnose() = 0;
  // Returns the operation's number in its communicator; 0: Send/Recv, which have none.
  virtual uint64_t sequence() const { return 0; }
  // Describes the task and what it waits for, naming ranks. Used in messages.
  virtual std::string describe() const = 0;
  // Returns until when the task may wait if it has been blocked since `since_ns`.
  virtual int64_t deadline_ns(int64_t since_ns) const { return since_ns + fabric_.timeout_ms * 1'000'000; }
  // Called when the task will not be polled again and this rank's failure is published. Gives back what it used of
  // peers.
  virtual void let_go() {}
  // Called after let_go(). Returns when no peer uses this rank's buffers any more; their owner may free them then. The
  // wait is bounded, even if a peer is stuck. Peers whose tasks this thread drives too have let go before.
  virtual void abandon() {}
  // Called before let_go(). Makes work on a device that waits for peers give up.
  virtual void stop() {}
  // After poll(): returns the only rank that can unblock the task, or transport::Engine::kAnyone.
  virtual uint32_t awaits() const { return transport::Engine::kAnyone; }
  // Returns whether `peer` may still be needed, so that its leaving is a failure.
  virtual bool needs(uint32_t peer) const = 0;
  // Returns true if `peer` is known to run the same task.
  virtual bool has_entered(uint32_t) const { return false; }

  Fabric& fabric() const { return fabric_; }
  // Returns whether `peer` still runs. Must be called after announcing on this rank's board what is used of the peer,
  // and again after the use.
  bool still_runs(uint32_t peer) const {
    return fabric_.link(peer).board().health.state.load(std::memory_order_seq_cst) ==
           static_cast<uint32_t>(transport::RankState::kRunning);
  }
  // Returns whether `peer` has left in order. What it sent before is here.
  bool has_left(uint32_t peer) const { return exec::has_left(fabric_, peer); }
  // Returns the time since it was first called. Called when a peer that the task needs has left.
  int64_t since_peer_left_ns(int64_t now) {
    if (peer_left_ns_ == 0) peer_left_ns_ = now;
    return now - peer_left_ns_;
  }
  const Status& status() const { return status_; }
  Progress fail(Status status) {
    status_ = std::move(status);
    return Progress::kFailed;
  }

 private:
  Fabric& fabric_;
  Status status_;
  int64_t peer_left_ns_ = 0;
};

// Calls task.poll(). An exception becomes the task's failure, so that its owner gives back what peers use of it.
template <class T>
Progress poll_contained(T& task) {
  try {
    return task.poll();
  } catch (const std::exception& e) {
    return task.fail(caught(e));
  }
}

// A byte's time in a copy on a busy machine.
inline constexpr int64_t kSlowCopy_ns = 2;
// Waits until `in_use` returns false, for at most `most_ns`. Peers look at each other's health every millisecond.
void wait_for_peers(const std::function<bool()>& in_use, int64_t most_ns = 1'000'000'000);

// Called where an operation has failed: returns when no network reads a source of this rank any more.
void take_sources_back(Fabric& fabric);

// While this object exists, a thread that waits in drive() calls `function` every few tens of microseconds; null: none.
// For the MPI shim, because MPI makes progress only within its own calls.
class WhileWaiting {
 public:
  explicit WhileWaiting(void (*function)());
  ~WhileWaiting();
  WhileWaiting(const WhileWaiting&) = delete;
  WhileWaiting& operator=(const WhileWaiting&) = delete;

 private:
  void (*const before_)();
};

// Runs all tasks to their ends and returns the first failure after all have ended. Every wait has an end: the
// communicator's timeout, an abort, or a failed or dead peer.
Status drive(std::span<Task* const> tasks);
inline Status drive(Task& task) {
  Task* const one = &task;
  return drive({&one, 1});
}
// Publishes that a task has failed with `status`, and lets go of peers; abandon() must follow. Returns the
// communicator's first failure, such as an abort from another thread.
Status publish_failure(Task& task, const Status& status);
// Does the same, then abandons the task.
Status give_up(Task& task, const Status& status);

// Returns why a rank has failed, from its board. The text is a peer's: bounded, printable, never trusted.
std::string failure_text(const transport::Board& board);
// Returns how a peer has failed, in the peer's own words if it has any, or success. A peer that has finished its part
// can no longer fail the task, whatever happens to it; with `waits_long`, however, failures of all peers count. A peer
// that has left may have heard of another rank's end elsewhere, so a rank that has failed or been lost is named
// instead.
Status check_peer_state(Task& task, uint32_t peer, bool waits_long = false);

// Returns how any peer for which `counts` returns true has failed or been lost, or success. For operations that no task
// watches.
Status check_peers(const Fabric& fabric, const std::function<bool(uint32_t)>& counts);

// Returns why a rank that has been blocked since `since_ns` must give up, or success. With `look_alive` it also checks
// whether the peers' processes are alive.
Status check_health(Task& task, int64_t since_ns, int64_t now, bool look_alive);

}  // namespace moeccl::exec
