// SPDX-License-Identifier: Apache-2.0
// A TCP port that is reserved for later.
#pragma once

#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/driver/socket.h"

namespace moeccl::driver {

// Takes a free port at this host's address and stores its number in *address. Until the descriptor is closed, the port
// has no listener and the kernel gives it to no other socket, but listen_at() can take it.
Result<Fd> reserve_port(SocketAddress* address);

}  // namespace moeccl::driver
