// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/messages/message_kernel_task.h"

#include <algorithm>

#include "src/base/clock.h"
#include "src/exec/revoked.h"

namespace moeccl::exec {

Status MessageKernelTask::begin() {
  // Two ranks may exchange messages forever without ever looking at a third one that has revoked the communicator.
  MOECCL_TRY(check_revoked(fabric()));
  for (const Message& m : messages_) records_.push_back(record(fabric(), m));
  return {};
}

std::string MessageKernelTask::describe() const {
  std::string text = messages_.front().describe();
  if (messages_.size() > 1) text += format(" and {} more messages", messages_.size() - 1);
  return text + ", on CUDA memory" + why_not_begun();
}

// What a rank has sent before it left is here, and is taken once this rank's launch has begun, which may wait for other
// work in its stream.
bool MessageKernelTask::needs(uint32_t peer) const {
  constexpr int64_t kTaken_ns = 1'000'000'000;
  const bool open = std::any_of(messages_.begin(), messages_.end(), [&](const Message& m) {
    return m.peer == peer && (number_ == 0 || kernel_.messages_ended(peer, m.is_send) < number_);
  });
  if (!open || peer == fabric().rank || !has_left(peer)) return open;
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
