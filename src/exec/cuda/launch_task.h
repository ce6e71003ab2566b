// SPDX-License-Identifier: Apache-2.0
// A launch during which the host has nothing to drive. Deadlines, aborts and lost peers end it as they end every
// operation.
#pragma once

#include <optional>
#include <string>

#include "src/driver/cuda/idle.h"
#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/task.h"

namespace moeccl::exec {

// From the launch to its end. Derived classes say what is launched.
class LaunchTask : public Task {
 public:
  Progress poll() final;
  Status diagnose() override;
  // Counts from the kernel's start: before, it waits for earlier work of the program or of the communicator. A launch
  // on the library's own stream has no such work before it, and counts at once. The device is told when the timeout
  // passes, and has a second to report the step.
  int64_t deadline_ns(int64_t since_ns) const final;
  void stop() final { kernel_.stop(); }

 protected:
  // It was launched as `number`. 0: it is launched on stream() when it can be.
  LaunchTask(Fabric& fabric, PersistentKernel& kernel, uint64_t number)
      : Task(fabric), kernel_(kernel), number_(number) {
    if (number == 0) promise_ = kernel.promise();
  }
  // Called once, at the first poll.
  virtual Status begin() = 0;
  virtual driver::cuda::Stream stream() const { return kernel_.engine().stream(); }
  virtual Status launch(driver::cuda::Stream stream, uint64_t* number) = 0;
  virtual bool begun() const = 0;
  virtual bool ended() const = 0;
  // Tells the device that the timeout has passed.
  virtual void expire() = 0;
  // Called when it has ended well.
  virtual void finish() = 0;
  // Returns ", which has not begun ..." for descriptions, or "" when it has.
  std::string why_not_begun() const;

  PersistentKernel& kernel_;
  uint64_t number_ = 0;

 private:
  bool is_polled_ = false;
  int64_t begun_ns_ = 0;  // since when the deadline counts; 0: the kernel was not seen to run
  Promise promise_;
  std::optional<driver::cuda::InFlight> in_flight_;  // if this task launches it
};

}  // namespace moeccl::exec
