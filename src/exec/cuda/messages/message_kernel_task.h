// SPDX-License-Identifier: Apache-2.0
// The messages of a group that a launch on the device moves, as the host sees them.
#pragma once

#include <string>
#include <vector>

#include "src/exec/cuda/launch_task.h"

namespace moeccl::exec {

class MessageKernelTask final : public LaunchTask {
 public:
  // They were launched as `number`; 0: they are launched on stream() when they can be.
  MessageKernelTask(Fabric& fabric, PersistentKernel& kernel, std::vector<Message> messages, uint64_t number)
      : LaunchTask(fabric, kernel, number), messages_(std::move(messages)) {}

  std::string describe() const override;
  bool needs(uint32_t peer) const override;
  void let_go() override;
  void abandon() override;

 private:
  Status begin() override;
  Status launch(driver::cuda::Stream stream, uint64_t* number) override {
    return kernel_.launch(messages_, stream, number);
  }
  // Messages wait for peers that may wait for what the engine still has to do in its stream.
  driver::cuda::Stream stream() const override { return kernel_.message_stream(); }
  bool begun() const override { return kernel_.messages_begun() >= number_; }
  bool ended() const override { return kernel_.messages_ended() >= number_; }
  void expire() override { kernel_.expire(number_, true); }
  void finish() override { end_records(false); }
  void end_records(bool failed);

  std::vector<Message> messages_;
  std::vector<size_t> records_;        // in the flight recorder
  mutable int64_t left_since_ns_ = 0;  // 0: no rank of these messages has left
};

}  // namespace moeccl::exec
