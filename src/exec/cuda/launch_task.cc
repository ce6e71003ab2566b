// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/launch_task.h"

#include "src/base/clock.h"
#include "src/base/log.h"

namespace moeccl::exec {

Progress LaunchTask::poll() {
  Fabric& f = fabric();
  if (began_ns_ == 0) {
    if (Status s = begin(); !s.ok()) return fail(std::move(s));
    began_ns_ = now_ns();
  }
  if (number_ == 0) {
    if (kernel_.would_wait(kernel_.engine().stream())) return Progress::kBlocked;
    in_flight_.emplace();
    if (Status s = launch(kernel_.engine().stream(), &number_); !s.ok()) return fail(std::move(s));
    promise_ = nullptr;
    return Progress::kMoved;
  }
  if (!ended()) return Progress::kBlocked;
  if (Status s = kernel_.failure(); !s.ok()) {
    log(LogLevel::kError, "{}: {}; its last operations:", f.who(), s.message());
    f.log_recorder();
    return fail(std::move(s));
  }
  finish();
  return Progress::kDone;
}

Status LaunchTask::diagnose() {
  MOECCL_TRY(kernel_.device_state());
  // The device's clock starts with its wait, later than the host's.
  if (now_ns() - began_ns_ > fabric().timeout_ms * 1'000'000) kernel_.expire();
  return {};
}

}  // namespace moeccl::exec
