// SPDX-License-Identifier: Apache-2.0
#include "transport/common/ordered_engine.h"

#include "src/base/clock.h"
#include "src/driver/thread.h"

namespace moeccl::transport {

PutOrder& process_put_order() {
  static PutOrder order;
  return order;
}

Status OrderedEngine::start() {
  MOECCL_ASSIGN_OR_RETURN(thread_, driver::start_thread(thread_name_, [this] {
                            while (!stop_.load(std::memory_order_acquire)) step();
                          }));
  return {};
}

bool OrderedEngine::stop() {
  if (process_.forked()) {
    new std::thread(std::move(thread_));
    return false;
  }
  stop_.store(true, std::memory_order_release);
  wake();
  if (thread_.joinable()) thread_.join();
  return true;
}

void OrderedEngine::begin() {
  driving_.fetch_add(1);
  drives_.fetch_add(1, std::memory_order_relaxed);
}

bool OrderedEngine::driven() {
  const uint32_t drives = drives_.load(std::memory_order_relaxed);
  const bool driving = driving_.load() > 0;
  return std::exchange(seen_drives_, drives) != drives || driving;
}

bool OrderedEngine::takes_over() {
  if (driving_.load() > 0) return false;
  seen_drives_ = drives_.load(std::memory_order_relaxed);
  return true;
}

void OrderedEngine::look_at_board(const Board& own) {
  if (!untold_.due(own)) return;
  if (const std::unique_lock lock(mutex_, std::try_to_lock); lock.owns_lock()) shielded([&] { tell_boards(); });
}

void OrderedEngine::board_changed(bool now) {
  untold_.set();
  if (!now) {
    if (driving_.load() == 0) wake();
    return;
  }
  const std::lock_guard lock(mutex_);
  shielded([&] { tell_boards(); });
  // It may be that no thread drives this rank any more while part of the board still waits for the network.
  if (unsent()) wake();
}

void OrderedEngine::operation(uint32_t traffic_class, bool begins_now) {
  const uint32_t c = order_class(traffic_class);
  running_[c].fetch_add(begins_now ? 1 : -1, std::memory_order_relaxed);
  if (begins_now) {
    begins(*order_, c, now_ns());
  } else {
    ends(*order_, c);
  }
}

bool OrderedEngine::lets_go(uint32_t traffic_class, size_t bytes) {
  return may_go(*order_, traffic_class, bytes, now_ns());
}

void OrderedEngine::moved() {
  int64_t now = 0;
  for (uint32_t c = 0; c < kTrafficClasses; ++c) {
    if (running_[c].load(std::memory_order_relaxed) <= 0) continue;
    if (now == 0) now = now_ns();
    moves(*order_, c, now);
  }
}

bool OrderedEngine::any_runs() const {
  return std::any_of(std::begin(running_), std::end(running_),
                     [](const auto& n) { return n.load(std::memory_order_relaxed) > 0; });
}

}  // namespace moeccl::transport
