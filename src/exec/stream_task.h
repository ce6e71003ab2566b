// A task on CUDA memory: the host's task, whose kernels go to a StreamEngine.
#pragma once

#include <memory>

#include "src/exec/stream_engine.h"
#include "src/exec/task.h"

namespace moeccl::exec {

class StreamTask final : public Task {
 public:
  StreamTask(std::unique_ptr<Task> inner, StreamEngine& engine)
      : Task(inner->fabric()), inner_(std::move(inner)), engine_(engine) {}

  Progress poll() override {
    const StreamEngine::Scope scope(engine_);
    const Progress p = inner_->poll();
    if (p == Progress::kFailed) return fail(inner_->status());
    if (!engine_.status().ok()) return fail(engine_.status());
    return p;
  }
  Status diagnose() override { return inner_->diagnose(); }
  std::string describe() const override { return inner_->describe() + ", on CUDA memory"; }
  bool needs(uint32_t peer) const override { return inner_->needs(peer); }
  void abandon() override {
    inner_->stop();
    (void)engine_.synchronize();  // what was launched no longer uses anybody's buffers
    inner_->abandon();
  }

 private:
  std::unique_ptr<Task> inner_;
  StreamEngine& engine_;
};

}  // namespace moeccl::exec
