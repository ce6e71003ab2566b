// A task on CUDA memory: the host's task, whose kernels go to a StreamEngine.
#pragma once

#include <memory>

#include "src/exec/cuda/stream_engine.h"
#include "src/exec/task.h"

namespace moeccl::exec {

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
    return inner_->describe() + ", on CUDA memory" +
           (ended_ ? ", which waits for what its stream was given before" : "");
  }
  bool needs(uint32_t peer) const override {
    return inner_->needs(peer) && !(ended_ && fabric().link(peer).sent_all());
  }
  void abandon() override {
    inner_->stop();
    (void)engine_.synchronize();  // what was launched no longer uses anybody's buffers
    inner_->abandon();
  }

 private:
  // What goes to other hosts leaves when the stream has made it: until then this thread drives the network.
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
  bool ended_ = false;  // the inner task is
};

}  // namespace moeccl::exec
