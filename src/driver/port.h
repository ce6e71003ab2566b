// SPDX-License-Identifier: Apache-2.0
// A TCP port that is kept for later.
#pragma once

#include "src/base/fd.h"
#include "src/base/status.h"
#include "src/driver/socket.h"

namespace moeccl::driver {

// Takes a free port of this host's address, which gets its number. Nobody listens there, and nobody is given the port
// by the kernel, until the descriptor is closed; meanwhile listen_at() takes it.
Result<Fd> reserve_port(SocketAddress* address);

}  // namespace moeccl::driver
