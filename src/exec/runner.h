// SPDX-License-Identifier: Apache-2.0
// How operations run: as an eager exchange, as the steps of a plan on host memory or on CUDA memory, or as one
// persistent kernel. A communicator has one runner for each way that it can take; an operation gets its runner when it
// is prepared, the same way on all ranks.
#pragma once

#include <memory>

#include "src/exec/task.h"

namespace moeccl::exec {

struct Operation;
class PersistentKernel;

class Runner {
 public:
  explicit Runner(Fabric& fabric) : fabric_(fabric) {}
  virtual ~Runner() = default;
  Runner(const Runner&) = delete;
  Runner& operator=(const Runner&) = delete;

  Fabric& fabric() const { return fabric_; }
  bool on_device() const { return fabric_.cuda; }

  // Before and after the operations of one call: what they read is ready, and whoever waits for their end is told.
  virtual Status begin() = 0;
  virtual Status end(Status status) = 0;
  // One operation on this thread, from begin() to end().
  virtual Status run(const Operation& op) = 0;
  // One operation beside others, which must outlive the task.
  virtual std::unique_ptr<Task> task(const Operation& op) = 0;
  // What is to be driven for a task of this fabric, or for several in a row.
  virtual std::unique_ptr<Task> driven(std::unique_ptr<Task> task) = 0;
  // The kernel, where it can be launched on a caller's stream; null: a thread drives the operation.
  virtual PersistentKernel* kernel() { return nullptr; }

 private:
  Fabric& fabric_;
};

}  // namespace moeccl::exec
