// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/device_watch.h"

#include <chrono>
#include <map>
#include <utility>

#include "src/driver/fork_page.h"
#include "src/driver/thread.h"

namespace moeccl::exec {

namespace cuda = driver::cuda;

namespace {

constexpr std::chrono::milliseconds kBetweenLooks{5};

struct Watches {
  std::mutex mutex;
  std::map<cuda::Context, std::weak_ptr<DeviceWatch>> of;
};

}  // namespace

Result<std::shared_ptr<DeviceWatch>> DeviceWatch::of(cuda::Context context) {
  static constinit driver::PerProcess<Watches> own;
  Watches& all = own.get();
  const std::lock_guard lock(all.mutex);
  std::weak_ptr<DeviceWatch>& known = all.of[context];
  if (std::shared_ptr<DeviceWatch> watch = known.lock(); watch != nullptr) return watch;
  auto watch = std::make_shared<DeviceWatch>(context);
  MOECCL_ASSIGN_OR_RETURN(watch->thread_, driver::start_thread("moeccl-device", [w = watch.get()] { w->loop(); }));
  known = watch;
  return watch;
}

DeviceWatch::~DeviceWatch() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

int DeviceWatch::ask(cuda::Event event) {
  const std::lock_guard lock(mutex_);
  if (std::exchange(wanted_, event) == nullptr) changed_.notify_all();
  return answer_;
}

void DeviceWatch::forget(cuda::Event event) {
  std::unique_lock lock(mutex_);
  if (wanted_ == event) wanted_ = nullptr;
  changed_.wait(lock, [&] { return event == nullptr || asked_ != event; });
}

void DeviceWatch::loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return ends_ || wanted_ != nullptr; });
    if (ends_) return;
    asked_ = std::exchange(wanted_, nullptr);
    lock.unlock();
    int rc = 0;
    {
      const cuda::Current current(context_);
      rc = cuda::driver()->cuEventQuery(asked_);
    }
    lock.lock();
    asked_ = nullptr;
    answer_ = rc == cuda::kNotReady ? 0 : rc;
    changed_.notify_all();
    (void)changed_.wait_for(lock, kBetweenLooks, [&] { return ends_; });
  }
}

}  // namespace moeccl::exec
