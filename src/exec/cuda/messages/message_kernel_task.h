// SPDX-License-Identifier: Apache-2.0
// The messages of a group that a launch on the device moves, as the host sees them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "src/driver/cuda/idle.h"
#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/task.h"

namespace moeccl::exec {

class MessageKernelTask final : public Task {
 public:
  // They were launched as `number`; 0: they are launched on the engine's stream when they can be.
  MessageKernelTask(Fabric& fabric, PersistentKernel& kernel, std::vector<Message> messages, uint64_t number)
      : Task(fabric), kernel_(kernel), messages_(std::move(messages)), number_(number) {
    if (number_ == 0) promise_ = kernel.promise();
  }

  Progress poll() override;
  Status diagnose() override;
  std::string describe() const override;
  bool needs(uint32_t peer) const override;
  // The device is told when the deadline passes, and its report names the message.
  int64_t grace_ms() const override { return 1000; }
  void stop() override { kernel_.stop(); }
  void let_go() override;
  void abandon() override;

 private:
  bool ended() const { return number_ > 0 && kernel_.messages_ended() >= number_; }
  void end_records(bool failed);

  PersistentKernel& kernel_;
  std::vector<Message> messages_;
  uint64_t number_;
  Promise promise_;
  std::optional<driver::cuda::InFlight> in_flight_;  // if this task launches them
  std::vector<size_t> records_;                      // in the flight recorder
  int64_t began_ns_ = 0;
  mutable int64_t left_since_ns_ = 0;  // 0: no rank of these messages has left
};

}  // namespace moeccl::exec
