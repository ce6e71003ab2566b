// SPDX-License-Identifier: Apache-2.0
// Several streams that a group's calls lie on: when all have reached the group, one of them runs the calls, and the
// others wait until the calls have ended.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "src/base/status.h"

namespace moeccl::comm {

class Meeting {
 public:
  explicit Meeting(size_t n_others) : n_awaited_(n_others) {}

  // For the streams that do not run the calls: says that the stream has got here, or why it could not, and waits.
  // Returns the calls' status. It needs no deadline, because each operation before and in the group has one.
  Status attend(const Status& arrival) {
    std::unique_lock lock(mutex_);
    if (arrived_.ok()) arrived_ = arrival;
    if (--n_awaited_ == 0) changed_.notify_all();
    changed_.wait(lock, [&] { return ended_ || (!begun_ && !called_off_.ok()); });
    return ended_ ? result_ : called_off_;
  }
  // For the one that runs the calls: waits for the others. On a failure, which is the first among their arrivals, the
  // calls must not run.
  Status gather() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return n_awaited_ == 0 || !called_off_.ok(); });
    if (!called_off_.ok()) return called_off_;
    begun_ = true;
    return arrived_;
  }
  void end(Status result) {
    const std::lock_guard lock(mutex_);
    result_ = std::move(result);
    ended_ = true;
    changed_.notify_all();
  }
  // Ends all waits, unless the calls have begun, which the others then wait for.
  void call_off(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (called_off_.ok()) called_off_ = why;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t n_awaited_;
  bool begun_ = false, ended_ = false;
  Status arrived_, called_off_, result_;
};

// The meetings of a communicator's calls, which end with it when it is aborted. Any thread.
class Meetings {
 public:
  void add(const std::shared_ptr<Meeting>& meeting) {
    const std::lock_guard lock(mutex_);
    std::erase_if(all_, [](const std::weak_ptr<Meeting>& m) { return m.expired(); });
    all_.push_back(meeting);
    if (!called_off_.ok()) meeting->call_off(called_off_);
  }
  void call_off(const Status& why) {
    const std::lock_guard lock(mutex_);
    if (called_off_.ok()) called_off_ = why;
    for (const std::weak_ptr<Meeting>& m : all_)
      if (const std::shared_ptr<Meeting> meeting = m.lock(); meeting != nullptr) meeting->call_off(why);
  }

 private:
  std::mutex mutex_;
  Status called_off_;
  std::vector<std::weak_ptr<Meeting>> all_;
};

}  // namespace moeccl::comm
