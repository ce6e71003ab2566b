// SPDX-License-Identifier: Apache-2.0
#include "src/base/random.h"

#include <sys/random.h>

#include <cerrno>

namespace moeccl {

Status random_bytes(void* to, size_t n_bytes) {
  auto* at = static_cast<unsigned char*>(to);
  while (n_bytes > 0) {
    const ssize_t n = ::getrandom(at, n_bytes, 0);
    if (n < 0) {
      if (errno == EINTR) continue;
      return system_error(format("getrandom of {} bytes", n_bytes), errno);
    }
    at += n;
    n_bytes -= static_cast<size_t>(n);
  }
  return {};
}

}  // namespace moeccl
