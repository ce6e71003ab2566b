// SPDX-License-Identifier: Apache-2.0
#include "src/driver/port.h"

#include <unistd.h>

#include <cerrno>

#include "src/base/clock.h"
#include "src/driver/children.h"

namespace moeccl::driver {
namespace {

enum class Reuse : uint8_t { kNo, kYes };

void reuse(const Fd& fd) {
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
}

// Returns a socket that is bound to the address, or an empty Fd if another one has it. With kYes, it may be one that is
// reserved, or that an ended connection still has.
Result<Fd> bound(const SocketAddress& address, Reuse with) {
  Fd fd = not_for_children(
      [&] { return ::socket(address.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!fd) return system_error("socket for " + address.str(), errno);
  if (with == Reuse::kYes) reuse(fd);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.length) == 0) return fd;
  if (errno == EADDRINUSE) return Fd();
  return system_error("bind to " + address.str(), errno);
}

// Tries the range's ports from a place that differs between processes and calls, first those that no socket has at all.
// take(address, reuse) returns an empty Fd for a port that is in use.
template <typename Take>
Result<Fd> first_free(SocketAddress* address, PortRange range, const Take& take) {
  const auto n = static_cast<uint32_t>(range.last - range.first + 1);
  const auto start = static_cast<uint32_t>(::getpid()) * 7919 + static_cast<uint32_t>(now_ns() / 1000);
  for (const Reuse with : {Reuse::kNo, Reuse::kYes}) {
    for (uint32_t i = 0; i < n; ++i) {
      address->set_port(static_cast<uint16_t>(range.first + (start + i) % n));
      MOECCL_ASSIGN_OR_RETURN(Fd fd, take(*address, with));
      if (fd) return fd;
    }
  }
  address->set_port(0);
  return error(moecclSystemError, "all ports from {} to {} of {} are in use: give MOECCL_PORT_RANGE more ports",
               range.first, range.last, address->host());
}

}  // namespace

Result<Fd> listen_in(SocketAddress* address, PortRange range) {
  if (!range.given() || address->is_unix() || address->is_any() || address->port() != 0) {
    MOECCL_ASSIGN_OR_RETURN(Fd fd, listen_at(*address));
    MOECCL_ASSIGN_OR_RETURN(*address, local_address(fd.get()));
    return fd;
  }
  return first_free(address, range, [](const SocketAddress& at, Reuse with) -> Result<Fd> {
    MOECCL_ASSIGN_OR_RETURN(Fd fd, bound(at, with));
    if (!fd) return fd;
    reuse(fd);  // so that a restarted job can have the port at once
    if (::listen(fd.get(), kBacklog) == 0) return fd;
    if (errno == EADDRINUSE) return Fd();
    return system_error("listen on " + at.str(), errno);
  });
}

Result<Fd> reserve_port(SocketAddress* address, PortRange range) {
  if (address->is_unix() || address->is_any()) {
    return error(moecclInvalidArgument, "cannot keep a port of {}: give the address of one interface", address->str());
  }
  Fd fd;
  if (range.given()) {
    MOECCL_ASSIGN_OR_RETURN(fd, first_free(address, range, bound));
  } else {
    MOECCL_ASSIGN_OR_RETURN(fd, bound(*address, Reuse::kNo));
    if (!fd) return error(moecclInvalidUsage, "{} is in use already", address->str());
  }
  MOECCL_ASSIGN_OR_RETURN(*address, local_address(fd.get()));
  return fd;
}

// Two sockets with this option may be bound to one port, as long as at most one of them listens.
void allow_listening(const Fd& reserved) { reuse(reserved); }

}  // namespace moeccl::driver
