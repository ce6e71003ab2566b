// SPDX-License-Identifier: Apache-2.0
// epoll: waits for many descriptors at once, at a cost that grows only with the number that are ready.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <span>

#include "src/base/clock.h"
#include "src/base/fd.h"
#include "src/base/status.h"

namespace moeccl::driver {

class Poller {
 public:
  static Result<Poller> create();

  // `events` is EPOLLIN, EPOLLOUT or 0 (errors and hang-ups only). It is level-triggered unless it includes EPOLLET.
  // `tag` is returned with each event.
  Status add(int fd, uint32_t events, uint64_t tag);
  Status modify(int fd, uint32_t events, uint64_t tag);
  void remove(int fd);
  // Returns the events that are ready by the deadline, or none if it has passed. The span is valid until the next wait.
  Result<std::span<const epoll_event>> wait(Deadline deadline);
  // Returns the events that are ready now.
  Result<std::span<const epoll_event>> look() { return wait({.at_ns = 0}); }
  // Readable while events are pending, for a thread that waits for them without taking them.
  int fd() const { return epoll_.get(); }

 private:
  explicit Poller(Fd epoll) : epoll_(std::move(epoll)) {}
  Fd epoll_;
  std::array<epoll_event, 64> ready_ = {};
};

// Wakes a Poller from another thread.
class WakeUp {
 public:
  static Result<WakeUp> create();
  int fd() const { return fd_.get(); }  // readable from signal() until clear()
  void signal();
  void clear();

 private:
  explicit WakeUp(Fd fd) : fd_(std::move(fd)) {}
  Fd fd_;
};

}  // namespace moeccl::driver
