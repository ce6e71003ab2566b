// SPDX-License-Identifier: Apache-2.0
// Several streams that a group's calls lie on: when all have reached the group, one of them runs the calls, and the
// others wait until the calls have ended.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <utility>

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
    changed_.wait(lock, [&] { return ended_; });
    return result_;
  }
  // For the one that runs the calls: waits for the others. Returns the first failure among their arrivals.
  Status gather() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return n_awaited_ == 0; });
    return arrived_;
  }
  void end(Status result) {
    const std::lock_guard lock(mutex_);
    result_ = std::move(result);
    ended_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t n_awaited_;
  bool ended_ = false;
  Status arrived_, result_;
};

}  // namespace moeccl::comm
