// The four ways of an operation (src/exec/runner.h).
#pragma once

#include "src/exec/cuda/stream_engine.h"
#include "src/exec/runner.h"

namespace moeccl::exec {

// On host memory, step by step. A thread that works for a caller's CUDA stream first waits for what that stream had.
class HostRunner : public Runner {
 public:
  using Runner::Runner;
  Status begin() override;
  Status end(Status status) override { return status; }
  Status run(const Operation& op) override;
  std::unique_ptr<Task> task(const Operation& op) override;
  std::unique_ptr<Task> driven(std::unique_ptr<Task> task) override { return task; }
};

class EagerRunner final : public HostRunner {
 public:
  using HostRunner::HostRunner;
  Status run(const Operation& op) override;
  std::unique_ptr<Task> task(const Operation& op) override;
};

// On CUDA memory, step by step, with the kernels of an engine.
class StreamRunner : public Runner {
 public:
  StreamRunner(Fabric& fabric, StreamEngine& engine) : Runner(fabric), engine_(engine) {}
  Status begin() override;
  Status end(Status status) override;
  Status run(const Operation& op) override;
  std::unique_ptr<Task> task(const Operation& op) override;
  std::unique_ptr<Task> driven(std::unique_ptr<Task> task) override;

 private:
  StreamEngine& engine_;
};

class KernelRunner final : public StreamRunner {
 public:
  KernelRunner(Fabric& fabric, PersistentKernel& kernel);
  Status run(const Operation& op) override;
  std::unique_ptr<Task> task(const Operation& op) override;
  PersistentKernel* kernel() override { return &kernel_; }

 private:
  PersistentKernel& kernel_;
};

}  // namespace moeccl::exec
