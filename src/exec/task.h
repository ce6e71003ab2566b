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

enum class Progress { kBlocked, kMoved, kDone, kFailed };

class Task {
 public:
  explicit Task(Fabric& fabric) : fabric_(fabric) {}
  virtual ~Task() = default;
  Task(const Task&) = delete;
  Task& operator=(const Task&) = delete;

  // Does what can be done now. After kDone or kFailed it is not called again.
  virtual Progress poll() = 0;
  // Looks, when blocked for a while, for reasons that a poll cannot see: a peer that calls something else.
  virtual Status diagnose() = 0;
  // The operation's number in its communicator; 0: Send/Recv, which have none.
  virtual uint64_t sequence() const { return 0; }
  // For messages: what it is and what it waits for, naming ranks.
  virtual std::string describe() const = 0;
  // After the communicator's timeout: how much longer what runs elsewhere may take to say where it waits.
  virtual int64_t grace_ms() const { return 0; }
  // It will not be polled again, and this rank's failure is published: gives back what it used of peers, and returns
  // when no peer uses this rank's buffers any more, which their owner may free then. Bounded, also when a peer is
  // stuck.
  virtual void abandon() {}
  // Comes before abandon(): what runs on a device and waits for peers gives up.
  virtual void stop() {}
  // After poll(): the only rank that can let it go on, or transport::Engine::kAnyone.
  virtual uint32_t awaits() const { return transport::Engine::kAnyone; }
  // Whether `peer` can still be needed, so that its leaving is a failure.
  virtual bool needs(uint32_t peer) const = 0;

  Fabric& fabric() const { return fabric_; }
  // Whether `peer` still runs; to be asked after announcing on the own board what is used of it, and again after the
  // use.
  bool still_runs(uint32_t peer) const {
    return fabric_.link(peer).board().health.state.load(std::memory_order_seq_cst) ==
           static_cast<uint32_t>(transport::RankState::kRunning);
  }
  const Status& status() const { return status_; }
  Progress fail(Status status) {
    status_ = std::move(status);
    return Progress::kFailed;
  }

 private:
  Fabric& fabric_;
  Status status_;
};

// task.poll(); what it throws is the task's failure, so that its owner gives back what peers use of it.
template <class T>
Progress poll_contained(T& task) {
  try {
    return task.poll();
  } catch (const std::exception& e) {
    return task.fail(caught(e));
  }
}

// Waits until `in_use` is false, for at most `most_ns`: peers look at each other's health every millisecond.
void wait_for_peers(const std::function<bool()>& in_use, int64_t most_ns = 1'000'000'000);

// Runs all tasks to their ends; the first failure is returned after all have ended. Every wait has an end: the
// communicator's timeout, an abort, a failed or dead peer.
Status drive(std::span<Task* const> tasks);
inline Status drive(Task& task) {
  Task* const one = &task;
  return drive({&one, 1});
}
// Ends a task that has failed so: the communicator's first failure, such as an abort from another thread.
Status give_up(Task& task, const Status& status);

// Why a rank has failed, from its board. A peer's words: bounded, printable, never trusted.
std::string failure_text(const transport::Board& board);
// How a peer has failed, in the peer's own words where it has any; else success. A peer that has finished its part
// cannot fail the task any more, whatever becomes of it; but `waits_long` asks about failures of all peers.
Status check_peer_state(Task& task, uint32_t peer, bool waits_long = false);

// Why a rank that has been blocked since `since_ns` must give up, or success. Every 20 ms it also asks whether the
// peers' processes live; `last_alive_ns` remembers when.
Status check_health(Task& task, int64_t since_ns, int64_t now, int64_t& last_alive_ns);

}  // namespace moeccl::exec
