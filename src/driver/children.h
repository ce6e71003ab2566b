// SPDX-License-Identifier: Apache-2.0
// Descriptors whose closing tells other processes that this process has ended. The other end of a socket or a pipe
// reports the end only when the last copy is closed, and a child made by fork() has copies of all descriptors. A rank
// whose data loader lives on would therefore seem alive after its death. For this reason, a child drops these
// descriptors before fork() returns in it. Children that execute another program lose them through close-on-exec, no
// matter how they were started.
#pragma once

#include "src/base/fd.h"

namespace moeccl::driver {

// While a ForkPause lives, no other thread's fork() can create a child with a descriptor that has not been passed to
// keep_from_children() yet. Hold it only for the call that creates the descriptor, never while waiting.
class ForkPause {
 public:
  ForkPause();
  ~ForkPause();
  ForkPause(const ForkPause&) = delete;
  ForkPause& operator=(const ForkPause&) = delete;
};

// Registers a socket, a pipe, a file in memory or a device. In a child its number stays taken, by an unconnected
// socket, because the owner of the number may still close it there. Closing `fd` in this process needs no further call.
void keep_from_children(int fd);

// Returns the new descriptor that `make` returns, or an empty Fd with errno set when `make` returns -1.
template <class Make>
Fd not_for_children(Make make) {
  const ForkPause pause;
  Fd fd(make());
  if (fd) keep_from_children(fd.get());
  return fd;
}

}  // namespace moeccl::driver
