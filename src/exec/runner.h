// SPDX-License-Identifier: Apache-2.0
// How operations run: as an eager exchange, as the steps of a plan on host memory or on CUDA memory, or as one
// persistent kernel. A communicator has one runner for each way that it can use. An operation gets its runner when it
// is prepared, in the same way on all ranks.
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

  // Called before and after the operations of one call. begin() makes their inputs ready; end() tells those that wait
  // for their end.
  virtual Status begin() = 0;
  virtual Status end(Status status) = 0;
  // Runs one operation on this thread, from begin() to end().
  virtual Status run(const Operation& op) = 0;
  // Returns a task that runs one operation beside others. `op` must outlive the task.
  virtual std::unique_ptr<Task> task(const Operation& op) = 0;
  // Returns the task to drive for a task of this fabric, or for several in a row.
  virtual std::unique_ptr<Task> driven(std::unique_ptr<Task> task) = 0;
  // Returns the kernel if it can be launched on a caller's stream. Null: a thread drives the operation.
  virtual PersistentKernel* kernel() { return nullptr; }

 private:
  Fabric& fabric_;
};

}  // namespace moeccl::exec
