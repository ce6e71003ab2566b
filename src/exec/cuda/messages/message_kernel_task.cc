// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/messages/message_kernel_task.h"

#include <algorithm>

#include "src/base/clock.h"
#include "src/base/data_type.h"
#include "src/base/log.h"
#include "src/exec/revoked.h"

namespace moeccl::exec {

Progress MessageKernelTask::poll() {
  Fabric& f = fabric();
  if (began_ns_ == 0) {
    // Two ranks may exchange messages forever without ever looking at a third one that has revoked the communicator.
    if (Status s = check_revoked(f); !s.ok()) return fail(std::move(s));
    began_ns_ = now_ns();
    for (const Message& m : messages_) {
      Signature signature;
      signature.op = moecclOpSendRecv;
      signature.type = m.type;
      signature.count = m.bytes / moecclTypeSize(m.type);
      signature.root = m.peer;
      records_.push_back(f.recorder.begin(0, signature));
      f.recorder.chose(records_.back(), m.is_send ? "send" : "receive");
    }
  }
  if (number_ == 0) {
    if (kernel_.would_wait(kernel_.engine().stream())) return Progress::kBlocked;
    in_flight_.emplace();
    if (Status s = kernel_.launch(messages_, kernel_.engine().stream(), &number_); !s.ok()) return fail(std::move(s));
    promise_ = nullptr;
    return Progress::kMoved;
  }
  if (!ended()) return Progress::kBlocked;
  if (Status s = kernel_.failure(); !s.ok()) {
    log(LogLevel::kError, "rank {} of {}: {}; its last operations:", f.rank, f.n_ranks, s.message());
    f.log_recorder();
    return fail(std::move(s));
  }
  end_records(false);
  return Progress::kDone;
}

Status MessageKernelTask::diagnose() {
  MOECCL_TRY(kernel_.device_state());
  // The device's clock starts with its wait, later than the host's.
  if (now_ns() - began_ns_ > fabric().timeout_ms * 1'000'000) kernel_.expire();
  return {};
}

std::string MessageKernelTask::describe() const {
  const Message& m = messages_.front();
  std::string text =
      format("{} of {} bytes {} rank {}", m.is_send ? "send" : "receive", m.bytes, m.is_send ? "to" : "from", m.peer);
  if (messages_.size() > 1) text += format(" and {} more messages", messages_.size() - 1);
  return text + ", on CUDA memory";
}

// What a rank has sent before it left is here, and is taken once this rank's launch has begun, which may wait for other
// work in its stream.
bool MessageKernelTask::needs(uint32_t peer) const {
  constexpr int64_t kTaken_ns = 1'000'000'000;
  const bool open = std::any_of(messages_.begin(), messages_.end(), [&](const Message& m) {
    return m.peer == peer && (number_ == 0 || kernel_.messages_ended(peer, m.is_send) < number_);
  });
  if (!open || peer == fabric().rank || !kernel_.has_left(peer)) return open;
  if (number_ == 0 || kernel_.messages_begun() < number_) return false;
  if (left_since_ns_ == 0) left_since_ns_ = now_ns();
  return now_ns() - left_since_ns_ > kTaken_ns;
}

void MessageKernelTask::end_records(bool failed) {
  for (const size_t r : records_) fabric().recorder.end(r, failed);
  records_.clear();
}

void MessageKernelTask::let_go() {
  end_records(true);
  kernel_.stop();
}

// Waits until this rank's kernel has left. A receiver of this process that reads a buffer here leaves for the same
// failure; the driver frees nothing that a kernel uses.
void MessageKernelTask::abandon() {
  if (number_ > 0) wait_for_peers([&] { return !ended(); });
}

}  // namespace moeccl::exec
