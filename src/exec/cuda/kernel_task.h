// SPDX-License-Identifier: Apache-2.0
// An operation of the persistent kernel as the host sees it.
#pragma once

#include <string>

#include "src/exec/cuda/launch_task.h"

namespace moeccl::exec {

// Returns the nanoseconds that an operation of this rank took on the device. 0: a later one may have overwritten them.
uint64_t walk_ns(const transport::Board& own, uint64_t number);

// One operation on the persistent kernel, from its launch to its end.
class KernelTask final : public LaunchTask {
 public:
  // It was launched as `number`; 0: it is launched on stream() when it can be.
  KernelTask(Fabric& fabric, PersistentKernel& kernel, const Operation& op, uint64_t number)
      : LaunchTask(fabric, kernel, number), op_(op) {}

  Status diagnose() override;
  std::string describe() const override;
  uint64_t sequence() const override { return number_; }
  bool has_entered(uint32_t peer) const override { return number_ > 0 && kernel_.has_launched(peer, number_); }
  bool needs(uint32_t peer) const override;
  void let_go() override;
  void abandon() override;

 private:
  Status begin() override;
  Status launch(driver::cuda::Stream stream, uint64_t* number) override { return kernel_.launch(op_, stream, number); }
  bool begun() const override { return kernel_.begun() >= number_; }
  bool ended() const override;
  void expire() override { kernel_.expire(number_, false); }
  void finish() override;

  const Operation& op_;
  size_t record_ = 0;      // in the flight recorder
  uint64_t sequence_ = 0;  // number of operations of the fabric that were called before
  // Since when a rank on another host seems to run something else, or to have left; 0: no rank does.
  int64_t differs_since_ns_ = 0;
  mutable int64_t left_since_ns_ = 0;
};

}  // namespace moeccl::exec
