// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <poll.h>

#include "src/driver/socket.h"

namespace moeccl::transport {

// For loops that make connections: returns the failure once one of the two ends of such a wait has come, see
// NetworkOptions::watch.
inline Status still_wanted(const driver::Watch& watch) {
  if (watch.cancelled) MOECCL_TRY(watch.cancelled());
  pollfd entry{watch.fd, POLLIN, 0};  // poll() skips a negative descriptor
  if (::poll(&entry, 1, 0) > 0) return error(moecclRemoteError, "another rank failed");
  return {};
}

}  // namespace moeccl::transport
