// SPDX-License-Identifier: Apache-2.0
// A launch beside which nothing has to be driven, as the host sees it: deadlines, aborts and lost peers end it as they
// end every operation.
#pragma once

#include <optional>

#include "src/driver/cuda/idle.h"
#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/task.h"

namespace moeccl::exec {

// From the launch to its end. Derived classes say what is launched.
class LaunchTask : public Task {
 public:
  Progress poll() final;
  Status diagnose() override;
  // The device is told when the deadline passes, and its report names the step.
  int64_t grace_ms() const final { return 1000; }
  void stop() final { kernel_.stop(); }

 protected:
  // It was launched as `number`. 0: it is launched on the engine's stream when it can be.
  LaunchTask(Fabric& fabric, PersistentKernel& kernel, uint64_t number)
      : Task(fabric), kernel_(kernel), number_(number) {
    if (number == 0) promise_ = kernel.promise();
  }
  // Called once, at the first poll.
  virtual Status begin() = 0;
  virtual Status launch(driver::cuda::Stream stream, uint64_t* number) = 0;
  virtual bool ended() const = 0;
  // Called when it has ended well.
  virtual void finish() = 0;

  PersistentKernel& kernel_;
  uint64_t number_ = 0;
  int64_t began_ns_ = 0;  // of the first poll

 private:
  Promise promise_;
  std::optional<driver::cuda::InFlight> in_flight_;  // if this task launches it
};

}  // namespace moeccl::exec
