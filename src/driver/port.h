// SPDX-License-Identifier: Apache-2.0
// TCP ports of a range that a firewall leaves open, and ports that are reserved for later.
#pragma once

#include "src/base/env.h"
#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/driver/socket.h"

namespace moeccl::driver {

// Listens as listen_at() does, and stores the port in *address. If the address is an IP address with port 0, takes a
// free port of the range.
Result<Fd> listen_in(SocketAddress* address, PortRange range);

// Takes a free port of the range at this host's address, which has port 0, and stores its number in *address. Until the
// descriptor is closed, the port has no listener, and neither the kernel nor listen_in() gives it to another socket.
// After allow_reuse(), listen_at() can take it.
Result<Fd> reserve_port(SocketAddress* address, PortRange range = {});

}  // namespace moeccl::driver
