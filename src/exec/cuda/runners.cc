#include "src/exec/cuda/runners.h"

#include "src/exec/cuda/persistent_kernel.h"
#include "src/exec/cuda/stream_task.h"
#include "src/exec/cuda/stream_work.h"
#include "src/exec/eager.h"

namespace moeccl::exec {

Status HostRunner::begin() {
  const StreamWork* work = StreamWork::current();
  return work != nullptr ? work->wait_ready() : Status();
}

Status HostRunner::run(const Operation& op) {
  MOECCL_TRY(begin());
  Execution task(fabric(), op);
  return drive(task);
}

std::unique_ptr<Task> HostRunner::task(const Operation& op) { return std::make_unique<Execution>(fabric(), op); }

Status EagerRunner::run(const Operation& op) {
  MOECCL_TRY(begin());
  return run_eager(fabric(), op);
}

std::unique_ptr<Task> EagerRunner::task(const Operation& op) { return std::make_unique<Eager>(fabric(), op); }

Status StreamRunner::begin() {
  const driver::cuda::Current current(engine_.context());
  if (StreamWork* work = StreamWork::current(); work != nullptr) {
    if (work->ready != nullptr) engine_.after(work->ready);
    work->add(&engine_);
  } else {
    // A blocking call comes after what the default stream has still to do.
    MOECCL_TRY(driver::cuda::check(driver::cuda::driver()->cuStreamSynchronize(nullptr), "the default stream"));
  }
  return engine_.status();
}

Status StreamRunner::end(Status status) {
  const StreamWork* work = StreamWork::current();
  if (!status.ok() || work == nullptr || work->blocks) {
    Status done = engine_.synchronize();
    if (status.ok()) status = std::move(done);
  }
  if (!status.ok()) fabric().fail(status);  // peers are told, also when nothing was started
  return status;
}

Status StreamRunner::run(const Operation& op) {
  Status status = begin();
  if (status.ok()) {
    StreamTask task(std::make_unique<Execution>(fabric(), op), engine_);
    status = drive(task);
  }
  return end(std::move(status));
}

std::unique_ptr<Task> StreamRunner::task(const Operation& op) { return std::make_unique<Execution>(fabric(), op); }

std::unique_ptr<Task> StreamRunner::driven(std::unique_ptr<Task> task) {
  return std::make_unique<StreamTask>(std::move(task), engine_);
}

KernelRunner::KernelRunner(Fabric& fabric, PersistentKernel& kernel)
    : StreamRunner(fabric, kernel.engine()), kernel_(kernel) {}

Status KernelRunner::run(const Operation& op) {
  Status status = begin();
  if (status.ok()) {
    KernelTask task(fabric(), kernel_, op);
    status = drive(task);
  }
  // Its end has been seen: nothing is left to wait for.
  return status.ok() ? std::move(status) : end(std::move(status));
}

std::unique_ptr<Task> KernelRunner::task(const Operation& op) {
  return std::make_unique<KernelTask>(fabric(), kernel_, op);
}

}  // namespace moeccl::exec
