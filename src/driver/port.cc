// SPDX-License-Identifier: Apache-2.0
#include "src/driver/port.h"

#include <cerrno>

#include "src/driver/children.h"

namespace moeccl::driver {

Result<Fd> reserve_port(SocketAddress* address) {
  if (address->is_unix() || address->is_any()) {
    return error(moecclInvalidArgument, "cannot keep a port of {}: give the address of one interface", address->str());
  }
  Fd fd = not_for_children([&] { return ::socket(address->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  if (!fd) return system_error("socket for " + address->str(), errno);
  // Two sockets with this option may be bound to one port, as long as at most one of them listens.
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address->storage), address->length) != 0)
    return system_error("bind to " + address->str(), errno);
  MOECCL_ASSIGN_OR_RETURN(*address, local_address(fd.get()));
  return fd;
}

}  // namespace moeccl::driver
