// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/runners.h"

#include "src/exec/cuda/kernel_task.h"
#include "src/exec/cuda/stream_work.h"
#include "src/exec/eager.h"

namespace moeccl::exec {
namespace {

// A host task whose kernels go to a StreamEngine.
class StreamTask final : public Task {
 public:
  StreamTask(std::unique_ptr<Task> inner, StreamEngine& engine)
      : Task(inner->fabric()), inner_(std::move(inner)), engine_(engine) {}

  Progress poll() override {
    const StreamEngine::Scope scope(engine_);
    if (!ended_) {
      const Progress p = inner_->poll();
      if (p == Progress::kFailed) return fail(inner_->status());
      if (!engine_.status().ok()) return fail(engine_.status());
      if (p != Progress::kDone) return p;
      ended_ = true;
    }
    return send_rest();
  }
  Status diagnose() override { return ended_ ? Status() : inner_->diagnose(); }
  std::string describe() const override {
    return inner_->describe() + ", on CUDA memory" + (ended_ ? ", which waits for earlier work in its stream" : "");
  }
  uint64_t sequence() const override { return inner_->sequence(); }
  uint32_t awaits() const override { return ended_ ? transport::Engine::kAnyone : inner_->awaits(); }
  bool has_entered(uint32_t peer) const override { return inner_->has_entered(peer); }
  bool needs(uint32_t peer) const override {
    if (!inner_->needs(peer)) return false;
    const transport::DeviceSide* const device = ended_ ? fabric().link(peer).device() : nullptr;
    return !ended_ || (device != nullptr && !device->sent_all());
  }
  int64_t deadline_ns(int64_t since_ns) const override {
    return ended_ ? Task::deadline_ns(since_ns) : inner_->deadline_ns(since_ns);
  }
  void stop() override { inner_->stop(); }
  void let_go() override {
    inner_->stop();
    (void)engine_.synchronize();  // after this, launched work no longer uses any buffers, unless it does not get on
    inner_->let_go();
  }
  void abandon() override { inner_->abandon(); }

 private:
  // Data for other hosts leaves once the stream has produced it: until then this thread drives the network.
  Progress send_rest() {
    Fabric& f = fabric();
    if (f.engine == nullptr) return Progress::kDone;
    if (f.failed()) return fail(f.failure());
    Result<bool> drained = f.engine->drained();
    if (!drained.ok()) return fail(std::move(drained).status());
    return *drained ? Progress::kDone : Progress::kBlocked;
  }

  std::unique_ptr<Task> inner_;
  StreamEngine& engine_;
  bool ended_ = false;  // the inner task has ended
};

class HostRunner : public Runner {
 public:
  using Runner::Runner;
  Status begin() override {
    const StreamWork* work = StreamWork::current();
    Status status = work != nullptr ? work->wait_ready(fabric()) : Status();
    if (!status.ok()) fabric().fail(status);  // tells the peers, although nothing was started
    return status;
  }
  Status end(Status status) override { return status; }
  Status run(const Operation& op) override {
    MOECCL_TRY(begin());
    Execution task(fabric(), op);
    return drive(task);
  }
  std::unique_ptr<Task> task(const Operation& op) override { return std::make_unique<Execution>(fabric(), op); }
  std::unique_ptr<Task> driven(std::unique_ptr<Task> task) override { return task; }
};

class EagerRunner final : public HostRunner {
 public:
  using HostRunner::HostRunner;
  Status run(const Operation& op) override {
    MOECCL_TRY(begin());
    return run_eager(fabric(), op);
  }
  std::unique_ptr<Task> task(const Operation& op) override { return std::make_unique<Eager>(fabric(), op); }
};

class StreamRunner : public Runner {
 public:
  StreamRunner(Fabric& fabric, StreamEngine& engine) : Runner(fabric), engine_(engine) { engine.serve(fabric); }
  Status begin() override {
    const driver::cuda::Current current(engine_.context());
    if (StreamWork* work = StreamWork::current(); work != nullptr) {
      // On the host: engines of several communicators share hardware channels, and a wait in this one's stream would
      // hold up the operation of another for which the caller's stream may be waiting.
      MOECCL_TRY(work->wait_ready(fabric()));
      work->add(&engine_);
    } else {
      MOECCL_TRY(after_default_stream());
    }
    return engine_.status();
  }
  Status end(Status status) override {
    const StreamWork* work = StreamWork::current();
    // Tells the peers, even if nothing was started, and ends the wait below soon if the stream does not get on.
    if (!status.ok()) fabric().fail(status);
    if (!status.ok() || work == nullptr || work->blocks) {
      Status done = engine_.synchronize();
      if (status.ok() && !done.ok()) fabric().fail(status = std::move(done));
    }
    return status;
  }
  Status run(const Operation& op) override {
    Status status = begin();
    if (status.ok()) status = drive(*driven(task(op)));
    return end(std::move(status));
  }
  std::unique_ptr<Task> task(const Operation& op) override {
    auto execution = std::make_unique<Execution>(fabric(), op);
    if (op.scale_at != nullptr) execution->scale_by(engine_.read_scalar(op.scale_at, op.signature.type));
    return execution;
  }
  std::unique_ptr<Task> driven(std::unique_ptr<Task> task) override {
    return std::make_unique<StreamTask>(std::move(task), engine_);
  }

 private:
  // A blocking call runs after the work that is still in the default stream. An abort ends this wait, too.
  Status after_default_stream() {
    MOECCL_ASSIGN_OR_RETURN(const auto earlier, EarlierWork::of_default_stream(engine_.context()));
    return earlier->wait(fabric());
  }

  StreamEngine& engine_;
};

class KernelRunner final : public StreamRunner {
 public:
  KernelRunner(Fabric& fabric, PersistentKernel& kernel) : StreamRunner(fabric, kernel.engine()), kernel_(kernel) {}
  Status run(const Operation& op) override {
    Status status = begin();
    if (status.ok()) status = drive(*task(op));
    // The end of the operation has been seen, so nothing is left to wait for.
    return status.ok() ? std::move(status) : end(std::move(status));
  }
  std::unique_ptr<Task> task(const Operation& op) override {
    return std::make_unique<KernelTask>(fabric(), kernel_, op, 0);
  }
  PersistentKernel* kernel() override { return &kernel_; }

 private:
  PersistentKernel& kernel_;
};

}  // namespace

std::unique_ptr<Runner> host_runner(Fabric& fabric) { return std::make_unique<HostRunner>(fabric); }
std::unique_ptr<Runner> eager_runner(Fabric& fabric) { return std::make_unique<EagerRunner>(fabric); }
std::unique_ptr<Runner> stream_runner(Fabric& fabric, StreamEngine& engine) {
  return std::make_unique<StreamRunner>(fabric, engine);
}
std::unique_ptr<Runner> kernel_runner(Fabric& fabric, PersistentKernel& kernel) {
  return std::make_unique<KernelRunner>(fabric, kernel);
}

}  // namespace moeccl::exec
