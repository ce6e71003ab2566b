// SPDX-License-Identifier: Apache-2.0
#include "src/moe/background.h"

namespace moeccl::comm {

Background::~Background() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Background::start(std::function<Status()> work) {
  {
    const std::lock_guard lock(mutex_);
    work_ = std::move(work);
    busy_ = true;
  }
  changed_.notify_all();
}

Status Background::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !busy_; });
  return result_;
}

void Background::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return busy_ || ending_; });
    if (!busy_) return;
    lock.unlock();
    Status made = contained(work_);
    lock.lock();
    result_ = std::move(made);
    busy_ = false;
    changed_.notify_all();
  }
}

}  // namespace moeccl::comm
