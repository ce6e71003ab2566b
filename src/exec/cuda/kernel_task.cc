// SPDX-License-Identifier: Apache-2.0
#include "src/exec/cuda/kernel_task.h"

#include <algorithm>

#include "src/base/clock.h"
#include "src/base/device_order.h"

namespace moeccl::exec {

namespace {

// The news of what a rank on another host has launched and ended comes over other connections than its entries and the
// news that it has left. The rank has a second to deliver both.
constexpr int64_t kBoth_ns = 1'000'000'000;

}  // namespace

uint64_t walk_ns(const transport::Board& own, uint64_t number) {
  const uint64_t took_ns = own.walks.ns[number % transport::kWalkTimes].load(std::memory_order_relaxed);
  // Acquire: the load above comes before the one below. The operation that shares the place stores its time before it
  // reports its end, so it may have done so as soon as the one before it has ended.
  std::atomic_thread_fence(std::memory_order_acquire);
  from_device();
  const bool overwritten = own.progress.walked.load(std::memory_order_relaxed) >= number + transport::kWalkTimes - 1;
  return overwritten ? 0 : std::max<uint64_t>(took_ns, 1);
}

Status KernelTask::begin() {
  Fabric& f = fabric();
  sequence_ = f.sequence;
  record_ = f.recorder.begin(number_ > 0 ? number_ : kernel_.launched() + 1, op_);
  f.recorder.chose(record_, op_.choice.algorithm);
  return {};
}

bool KernelTask::ended() const {
  // Acquire: pairs with the release in walk_leave() on the device.
  return load_from_device(fabric().own->board().progress.walked) >= number_;
}

void KernelTask::finish() {
  // The device's own time: the host's begins with the launch, after which the kernel may wait for the caller's kernels.
  Recorder& recorder = fabric().recorder;
  const bool is_asked_for = op_.measured != nullptr || recorder.has_profiler();
  const uint64_t took_ns = is_asked_for ? walk_ns(fabric().own->board(), number_) : 0;
  recorder.end(record_, false, took_ns);
  if (op_.measured != nullptr && took_ns > 0)
    op_.measured->ns.store(static_cast<double>(took_ns), std::memory_order_relaxed);
}

// The kernels compare what they run. This finds a peer that runs an operation of the other kind (one that the proxy
// drives) in place of this one.
Status KernelTask::diagnose() {
  const Fabric& f = fabric();
  MOECCL_TRY(LaunchTask::diagnose());
  for (uint32_t p = 0; p < f.n_ranks; ++p) {
    if (p == f.rank) continue;
    const transport::Board& board = f.link(p).board();
    const transport::Entry& e = board.entries[(sequence_ + 1) % transport::kEntries];
    if (load_from_device(e.seq) != sequence_ + 1) continue;
    if (kernel_.has_launched(p, number_)) continue;
    if (kernel_.elsewhere(p)) {
      if (differs_since_ns_ == 0) differs_since_ns_ = now_ns();
      if (now_ns() - differs_since_ns_ < kBoth_ns) continue;
    }
    const Signature other = unpack(e.signature.load(std::memory_order_relaxed), e.count.load(std::memory_order_relaxed),
                                   e.plan.load(std::memory_order_relaxed));
    const bool first = f.rank < p;
    return Status(moecclMismatch, describe_difference(std::min(f.rank, p), first ? op_.signature : other,
                                                      std::max(f.rank, p), first ? other : op_.signature));
  }
  return {};
}

std::string KernelTask::describe() const {
  return format("{} #{} of the persistent kernel (count {}, plan {}), on CUDA memory{}", op_name(op_.signature.op),
                number_, op_.signature.count, op_.choice.algorithm, why_not_begun());
}

bool KernelTask::needs(uint32_t peer) const {
  if (kernel_.has_ended(peer, number_)) return false;
  if (!kernel_.elsewhere(peer) || !has_left(peer)) return true;
  if (left_since_ns_ == 0) left_since_ns_ = now_ns();
  return now_ns() - left_since_ns_ > kBoth_ns;
}

void KernelTask::let_go() {
  fabric().recorder.end(record_, true);
  kernel_.stop();
}

void KernelTask::abandon() {
  Fabric& f = fabric();
  if (number_ == 0) return;
  // Wait until this rank's kernel, and those of peers that may be using its buffers, have left.
  wait_for_peers([&] {
    const auto running = [&](const transport::Board& b) {
      return load_from_device(b.progress.walks_called) >= number_ && load_from_device(b.progress.walked) < number_;
    };
    if (running(f.own->board())) return true;
    for (uint32_t p = 0; p < f.n_ranks; ++p)
      if (p != f.rank && f.link(p).view().same_process && running(f.link(p).board())) return true;
    return false;
  });
}

}  // namespace moeccl::exec
