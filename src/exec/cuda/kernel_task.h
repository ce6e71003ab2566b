// SPDX-License-Identifier: Apache-2.0
// An operation of the persistent kernel as the host sees it: deadlines, aborts and lost peers end it as they end every
// operation.
#pragma once

#include <optional>
#include <string>

#include "src/driver/cuda/idle.h"
#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/task.h"

namespace moeccl::exec {

// One operation on the persistent kernel, from its launch to its end.
class KernelTask final : public Task {
 public:
  // It was launched as `number`, or is launched on the engine's stream at the first poll.
  KernelTask(Fabric& fabric, PersistentKernel& kernel, const Operation& op, uint64_t number)
      : Task(fabric), kernel_(kernel), op_(op), number_(number) {}
  KernelTask(Fabric& fabric, PersistentKernel& kernel, const Operation& op)
      : Task(fabric), kernel_(kernel), op_(op), promise_(kernel.promise()) {}

  Progress poll() override;
  Status diagnose() override;
  std::string describe() const override;
  bool needs(uint32_t peer) const override;
  // The device is told when the deadline passes, and its report names the step.
  int64_t grace_ms() const override { return 1000; }
  void stop() override { kernel_.stop(); }
  void let_go() override;
  void abandon() override;

 private:
  PersistentKernel& kernel_;
  const Operation& op_;
  uint64_t number_ = 0;
  Promise promise_;
  std::optional<driver::cuda::InFlight> in_flight_;  // if this task launches it
  bool watching_ = false;
  size_t record_ = 0;      // in the flight recorder
  uint64_t sequence_ = 0;  // number of operations of the fabric that were called before
  int64_t began_ns_ = 0;
  // Since when a rank on another host seems to run something else, or to have left; 0: no rank does.
  int64_t differs_since_ns_ = 0;
  mutable int64_t left_since_ns_ = 0;
};

}  // namespace moeccl::exec
