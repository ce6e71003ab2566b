// SPDX-License-Identifier: Apache-2.0
// Helpers for sockets in tests.
#pragma once

#include <poll.h>

#include <cerrno>
#include <utility>

#include "src/driver/socket.h"

namespace moeccl::tests {

inline Result<Fd> accept_until(int listener, Deadline deadline) {
  for (;;) {
    MOECCL_ASSIGN_OR_RETURN(Fd fd, driver::accept_now(listener));
    if (fd) return fd;
    MOECCL_TRY(driver::wait_fd(listener, POLLIN, deadline).status());
  }
}

inline Result<std::pair<Fd, Fd>> socket_pair() {
  int fds[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) != 0)
    return system_error("socketpair", errno);
  return std::pair<Fd, Fd>(Fd(fds[0]), Fd(fds[1]));
}

}  // namespace moeccl::tests
