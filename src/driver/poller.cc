// SPDX-License-Identifier: Apache-2.0
#include "src/driver/poller.h"

#include <sys/eventfd.h>

#include <cerrno>

namespace moeccl::driver {

Result<Poller> Poller::create() {
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) return system_error("epoll_create1", errno);
  return Poller(std::move(epoll));
}

Status Poller::add(int fd, uint32_t events, uint64_t tag) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return system_error("epoll_ctl add", errno);
  return {};
}

Status Poller::modify(int fd, uint32_t events, uint64_t tag) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = tag;
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) != 0) return system_error("epoll_ctl modify", errno);
  return {};
}

void Poller::remove(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

Result<std::span<const epoll_event>> Poller::wait(Deadline deadline) {
  for (;;) {
    const int n = ::epoll_wait(epoll_.get(), ready_.data(), static_cast<int>(ready_.size()), deadline.remaining_ms());
    if (n >= 0) return std::span<const epoll_event>(ready_.data(), static_cast<size_t>(n));
    if (errno != EINTR) return system_error("epoll_wait", errno);
  }
}

Result<WakeUp> WakeUp::create() {
  Fd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!fd) return system_error("eventfd", errno);
  return WakeUp(std::move(fd));
}

void WakeUp::signal() {
  const uint64_t one = 1;
  // This fails only when 2^64 - 2 signals are pending, in which case the descriptor is readable anyway.
  while (::write(fd_.get(), &one, sizeof(one)) < 0 && errno == EINTR) {
  }
}

void WakeUp::clear() {
  uint64_t count;
  while (::read(fd_.get(), &count, sizeof(count)) < 0 && errno == EINTR) {
  }
}

}  // namespace moeccl::driver
