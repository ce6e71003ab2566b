// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/launch_task.h"

#include <algorithm>
#include <limits>

#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/exec/cuda/urgent_stream.h"

namespace moeccl::exec {

Progress LaunchTask::poll() {
  Fabric& f = fabric();
  if (!is_polled_) {
    if (Status s = begin(); !s.ok()) return fail(std::move(s));
    is_polled_ = true;
  }
  if (number_ == 0) {
    if (kernel_.would_wait(stream())) return Progress::kBlocked;
    in_flight_.emplace();
    if (Status s = launch(stream(), &number_); !s.ok()) return fail(std::move(s));
    promise_ = nullptr;
    begun_ns_ = now_ns();
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
  if (begun_ns_ == 0 && number_ > 0 && begun()) begun_ns_ = now_ns();
  // The device's clock starts anew with each wait.
  if (begun_ns_ > 0 && now_ns() - begun_ns_ > fabric().timeout_ms * 1'000'000) expire();
  return {};
}

std::string LaunchTask::why_not_begun() const {
  if (number_ == 0 || begun()) return "";
  return format(", which has not begun because of work before it in its stream or hardware queue ({})", held_up());
}

int64_t LaunchTask::deadline_ns(int64_t since_ns) const {
  if (begun_ns_ == 0) return std::numeric_limits<int64_t>::max();
  return Task::deadline_ns(std::max(since_ns, begun_ns_)) + 1'000'000'000;
}

}  // namespace moeccl::exec
