// SPDX-License-Identifier: Apache-2.0
#include "src/driver/port.h"

#include <unistd.h>

#include <utility>

#include "src/base/clock.h"

namespace moeccl::driver {
namespace {

// Tries the range's ports from a place that differs between processes and calls, first those that no socket has at all.
// take(address, reuse) returns InvalidUsage for a port that is in use.
template <typename Take>
Result<Fd> first_free(SocketAddress* address, PortRange range, const Take& take) {
  const auto n = static_cast<uint32_t>(range.last - range.first + 1);
  const auto start = static_cast<uint32_t>(::getpid()) * 7919 + static_cast<uint32_t>(now_ns() / 1000);
  for (const Reuse with : {Reuse::kNo, Reuse::kYes}) {
    for (uint32_t i = 0; i < n; ++i) {
      address->set_port(static_cast<uint16_t>(range.first + (start + i) % n));
      Result<Fd> fd = take(*address, with);
      if (fd.ok() || fd.status().code() != moecclInvalidUsage) return fd;
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
    MOECCL_ASSIGN_OR_RETURN(Fd fd, bind_to(at, with));
    allow_reuse(fd);  // so that a restarted job can have the port at once
    return listening(std::move(fd), at, kBacklog);
  });
}

Result<Fd> reserve_port(SocketAddress* address, PortRange range) {
  if (address->is_unix() || address->is_any()) {
    return error(moecclInvalidArgument, "cannot keep a port of {}: give the address of one interface", address->str());
  }
  MOECCL_ASSIGN_OR_RETURN(Fd fd, range.given() ? first_free(address, range, bind_to) : bind_to(*address, Reuse::kNo));
  MOECCL_ASSIGN_OR_RETURN(*address, local_address(fd.get()));
  return fd;
}

}  // namespace moeccl::driver
