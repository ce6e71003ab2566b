// SPDX-License-Identifier: Apache-2.0
// Asks the driver whether a context's device still works, on a thread of its own. A call such as cuMemFree waits for
// the device, and no other call of the context returns meanwhile: the thread that looks for lost peers, and tells the
// kernel for which cuMemFree waits, must not be one that hangs there.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

#include "src/driver/cuda.h"

namespace moeccl::exec {

class DeviceWatch {
 public:
  // Returns the context's watch. It is made with its first owner and ends with its last.
  static Result<std::shared_ptr<DeviceWatch>> of(driver::cuda::Context context);
  explicit DeviceWatch(driver::cuda::Context context) : context_(context) {}
  ~DeviceWatch();
  DeviceWatch(const DeviceWatch&) = delete;
  DeviceWatch& operator=(const DeviceWatch&) = delete;

  // Returns the driver's last answer, an error of the device or 0, and has the thread ask again for this event. Never
  // waits for the driver. Any thread.
  int ask(driver::cuda::Event event);
  // Returns when the thread does not ask for the event any more.
  void forget(driver::cuda::Event event);

 private:
  void loop();

  const driver::cuda::Context context_;
  std::mutex mutex_;
  std::condition_variable changed_;
  driver::cuda::Event wanted_ = nullptr, asked_ = nullptr;  // for the thread to ask for next, and now
  int answer_ = 0;
  bool ends_ = false;
  std::thread thread_;
};

}  // namespace moeccl::exec
