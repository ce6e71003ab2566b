// SPDX-License-Identifier: Apache-2.0
#include "src/comm/stream.h"

#include <utility>

#include "src/comm/group.h"

namespace moeccl::comm {

HostStream::~HostStream() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  work_came_.notify_one();
  thread_.join();
}

Status HostStream::ready() {
  if (birth_.here()) return {};
  return error(moecclInvalidUsage, "the stream belongs to the process that this one was forked from: make one here");
}

Stream::Work HostStream::hold(std::function<Status()> work) {
  Work held;
  held.item.push_back(std::move(work));
  return held;
}

Status HostStream::enqueue(Work work) {
  if (!birth_.here()) return contained(work.item.front());
  {
    const std::lock_guard lock(mutex_);
    queue_.splice(queue_.end(), work.item);
    ++put_;
  }
  work_came_.notify_one();
  return {};
}

Status HostStream::synchronize() {
  MOECCL_TRY(ready());
  const bool help = waiters_run_ && !Group::open_here();  // calls of the work would join that group
  std::unique_lock lock(mutex_);
  const uint64_t until = put_;
  while (run_ < until) {
    if (help && !running_) {
      run_first(lock);
    } else {
      ++waiters_;
      work_ended_.wait(lock);
      --waiters_;
    }
  }
  return std::exchange(first_failure_, Status());
}

HostStream::Count HostStream::count() const {
  const std::lock_guard lock(mutex_);
  return {put_, run_};
}

void HostStream::run_first(std::unique_lock<std::mutex>& lock) {
  std::function<Status()> work = std::move(queue_.front());
  queue_.pop_front();
  running_ = true;
  lock.unlock();
  Status status = contained(work);
  work = nullptr;
  lock.lock();
  running_ = false;
  if (!status.ok() && first_failure_.ok()) first_failure_ = std::move(status);
  ++run_;
  // A wake-up takes longer than a small call where peers need the core, so only a thread with something to do is woken.
  if (waiters_ > 0) work_ended_.notify_all();
  if (!queue_.empty() || ending_) work_came_.notify_one();
}

void HostStream::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_came_.wait(lock, [&] { return !running_ && (ending_ || !queue_.empty()); });
    if (queue_.empty()) return;
    run_first(lock);
  }
}

}  // namespace moeccl::comm
